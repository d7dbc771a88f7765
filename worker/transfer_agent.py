"""The KV transfer agent as a worker sees it: copies, and whether any may still write."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from mesh.client import Channels
from mesh.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 0.5
_SETTLE_S = 0.05
_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 2.0

# With these the call may have ended here and not on the agent.
_AMBIGUOUS = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
)


class PullFailed(Exception):
    """The blocks did not arrive; `may_still_write` tells whether some yet could."""

    def __init__(self, reason: str, *, may_still_write: bool) -> None:
        super().__init__(reason)
        self.may_still_write = may_still_write


class TransferAgent:
    """One machine's agent."""

    def __init__(self, channels: Channels, address: str) -> None:
        self._address = address
        self._stub = kv_transfer_pb2_grpc.KvTransferServiceStub(channels.get(address))

    async def pull(
        self, request: kv_transfer_pb2.PullRequest, timeout_s: float | None
    ) -> kv_transfer_pb2.PullResponse:
        """Copy blocks from another engine; raises PullFailed."""
        with _pull_errors():
            return await self._stub.Pull(request, timeout=timeout_s)

    async def load(
        self, request: kv_transfer_pb2.LoadBlocksRequest, timeout_s: float
    ) -> kv_transfer_pb2.LoadBlocksResponse:
        """Copy blocks from the colder tiers; raises PullFailed."""
        with _pull_errors():
            return await self._stub.LoadBlocks(request, timeout=timeout_s)

    async def store(
        self, request: kv_transfer_pb2.StoreBlocksRequest, timeout_s: float
    ) -> kv_transfer_pb2.StoreBlocksResponse:
        """Copy blocks to the colder tiers, which only reads them; raises PullFailed."""
        with _pull_errors():
            return await self._stub.StoreBlocks(request, timeout=timeout_s)

    async def wait_until_quiet(self, request_id: str) -> None:
        """Until no copy that was asked for with this id can write any more.

        A frozen agent goes on with its copies when it thaws, so this may take for ever.
        """
        delay_s = _FIRST_DELAY_S
        while not await self.is_quiet(request_id):
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        logger.info("transfer agent is quiet", extra={"address": self._address})

    async def is_quiet(self, request_id: str) -> bool:
        """Whether the agent is gone, or says twice that it copies nothing for this id.

        Twice, because a pull that has just reached it may not be counted yet.
        """
        if await self._is_gone():
            return True
        if not await self._is_idle(request_id):
            return False
        await asyncio.sleep(_SETTLE_S)
        return await self._is_idle(request_id)

    async def _is_idle(self, request_id: str) -> bool:
        request = kv_transfer_pb2.GetStatsRequest(request_id=request_id)
        try:
            stats = await self._stub.GetStats(request, timeout=_PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return stats.num_active_pulls == 0

    async def _is_gone(self) -> bool:
        """A frozen process still has its port; only of a dead one is the port closed."""
        host, _, port = self._address.rpartition(":")
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        writer.close()
        return False


@contextmanager
def _pull_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        reason = f"{error.code().name}: {error.details()}"
        raise PullFailed(reason, may_still_write=error.code() in _AMBIGUOUS) from error
