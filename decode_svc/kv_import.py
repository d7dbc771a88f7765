"""Fetches the KV that a prefill worker holds for a request into this worker's blocks."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, Self

import grpc

from decode_svc.transfer_agent import PullFailed, TransferAgent
from engine.request import RemoteKvWanted
from mesh import metrics
from mesh.client import Channels
from mesh.v1 import kv_transfer_pb2, prefill_pb2, prefill_pb2_grpc, types_pb2

logger = logging.getLogger(__name__)

_SHORTEST_RENEWAL_S = 0.1
_LONGEST_RENEWAL_S = 10.0


class Fallback(StrEnum):
    """Why a prompt was computed again although a prefill worker had computed it."""

    LAYOUT_MISMATCH = "layout_mismatch"
    INCOMPLETE = "incomplete"
    LEASE_EXPIRED = "lease_expired"
    HOLDER_UNREACHABLE = "holder_unreachable"
    PULL_FAILED = "pull_failed"


class RemoteKvSink(Protocol):
    """What an import tells the engine: one of the two, once."""

    def remote_kv_done(self, request_id: str) -> None: ...

    def remote_kv_failed(self, request_id: str) -> None: ...


@dataclass(frozen=True)
class KvImportLimits:
    """How long an import waits for the other side."""

    pull_timeout_s: float = 10.0
    release_timeout_s: float = 2.0


@dataclass(frozen=True)
class RemoteKv:
    """KV on a prefill worker, and until when (by time.monotonic) its request is of use."""

    handle: types_pb2.KvHandle
    deadline: float = math.inf


class KvImporter:
    """Makes claims on remote KV, and owns the work that outlives their requests."""

    def __init__(
        self,
        engine: RemoteKvSink,
        channels: Channels,
        *,
        engine_id: str,
        layout_fingerprint: str,
        block_size: int,
        limits: KvImportLimits,
    ) -> None:
        self.engine = engine
        self.channels = channels
        self.engine_id = engine_id
        self.limits = limits
        self._layout_fingerprint = layout_fingerprint
        self._block_size = block_size
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Give up what still runs: no request does any more."""
        for task in self._tasks:
            task.cancel()
        await self.wait_until_idle()

    def objection(self, handle: types_pb2.KvHandle, num_tokens: int) -> Fallback | None:
        """Why `handle` cannot stand for the KV of `num_tokens` tokens here, if it cannot."""
        if handle.layout_fingerprint != self._layout_fingerprint:
            return Fallback.LAYOUT_MISMATCH
        num_blocks = -(-num_tokens // self._block_size)
        if handle.num_tokens < num_tokens or len(handle.block_ids) < num_blocks:
            return Fallback.INCOMPLETE
        return None

    def claim(self, request_id: str, remote: RemoteKv) -> "KvClaim":
        """A right to remote KV for one request; to be entered, and left, whatever happens."""
        return KvClaim(self, request_id, remote)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what has to end whether or not its request lives on."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    async def wait_until_idle(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("KV import broke", exc_info=error)


class KvClaim:
    """One request's claim on a handle: renewed until used, released however it ends.

    Leaving the block does not wait for a pull that is under way: it ends by itself, and
    until the import has told the engine so, the engine keeps the destination blocks.
    """

    def __init__(self, importer: KvImporter, request_id: str, remote: RemoteKv) -> None:
        self._importer = importer
        self._request_id = request_id
        self._handle = remote.handle
        self._deadline = remote.deadline
        self._holder = prefill_pb2_grpc.PrefillServiceStub(
            importer.channels.get(remote.handle.holder_address)
        )
        self._agent = TransferAgent(importer.channels, remote.handle.transfer_address)
        self._is_expired = False
        self._is_released = False
        self._is_over = False
        self.is_importing = False
        self.payload_bytes = 0

    async def __aenter__(self) -> Self:
        self._renewal = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._is_over = True
        self._renewal.cancel()
        self._release_soon()
        if not self.is_importing:
            # The engine may have asked, and nobody will answer it any more.
            self._importer.engine.remote_kv_failed(self._request_id)

    def covers(self, num_tokens: int) -> bool:
        """Whether the handle has the KV of so many tokens, in a form that fits here."""
        objection = self._importer.objection(self._handle, num_tokens)
        if objection is not None:
            count_fallback(objection)
        return objection is None

    def start_import(self, wanted: RemoteKvWanted, on_limbo: Callable[[], None]) -> None:
        """Fetch the wanted blocks and tell the engine how that ended.

        `on_limbo` is called when the transfer failed while the agent may still write.
        The engine then keeps the blocks until it cannot, so the request has to start
        over with others.
        """
        self.is_importing = True
        self._importer.start(self._import(wanted, on_limbo))

    async def _import(self, wanted: RemoteKvWanted, on_limbo: Callable[[], None]) -> None:
        tell_engine = self._importer.engine.remote_kv_failed
        try:
            fallback = await self._fetch(wanted, on_limbo)
            if fallback is None:
                tell_engine = self._importer.engine.remote_kv_done
        finally:
            # Dead or alive, the request waits for this.
            tell_engine(self._request_id)

    async def _fetch(self, wanted: RemoteKvWanted, on_limbo: Callable[[], None]) -> Fallback | None:
        """Fill the wanted blocks; None when they are whole and nobody has changed their source."""
        fallback = Fallback.LEASE_EXPIRED if self._is_expired else None
        may_still_write = False
        if fallback is None and wanted.block_ids:
            try:
                response = await self._agent.pull(
                    self._pull_request(wanted), self._pull_timeout_s()
                )
            except PullFailed as error:
                logger.warning("pull failed", extra={"reason": str(error)})
                fallback, may_still_write = Fallback.PULL_FAILED, error.may_still_write
            else:
                self.payload_bytes = response.payload_bytes
                fallback = await self._release()
        self._release_soon()
        if fallback is not None and not self._is_over:
            count_fallback(fallback)
        if may_still_write and not await self._agent.is_quiet():
            on_limbo()
            await self._agent.wait_until_quiet()
        return fallback

    def _pull_timeout_s(self) -> float:
        left_s = max(0.0, self._deadline - time.monotonic())
        return min(self._importer.limits.pull_timeout_s, left_s)

    def _pull_request(self, wanted: RemoteKvWanted) -> kv_transfer_pb2.PullRequest:
        first = wanted.first_block_index
        return kv_transfer_pb2.PullRequest(
            request_id=self._request_id,
            source_engine_id=self._handle.engine_id,
            source_block_ids=self._handle.block_ids[first : first + len(wanted.block_ids)],
            destination_engine_id=self._importer.engine_id,
            destination_block_ids=wanted.block_ids,
        )

    async def _renew(self) -> None:
        """Keep the lease while the request waits for room and while its blocks are read."""
        expires_at_s = self._handle.lease_expires_at.ToNanoseconds() / 1e9
        is_reported = False
        while True:
            # A third of what is left; bounded, for the holder's clock may differ.
            delay_s = (expires_at_s - time.time()) / 3
            await asyncio.sleep(min(max(delay_s, _SHORTEST_RENEWAL_S), _LONGEST_RENEWAL_S))
            try:
                response = await self._holder.RenewKv(
                    prefill_pb2.RenewKvRequest(handle_id=self._handle.handle_id),
                    timeout=self._importer.limits.release_timeout_s,
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    self._is_expired = True
                    return
                if not is_reported:
                    logger.warning("lease not renewed", extra={"reason": error.details()})
                    is_reported = True
            else:
                expires_at_s = response.lease_expires_at.ToNanoseconds() / 1e9

    async def _release(self) -> Fallback | None:
        """Give the handle back; None when its lease was live until then."""
        self._renewal.cancel()
        self._is_released = True
        try:
            response = await self._holder.ReleaseKv(
                prefill_pb2.ReleaseKvRequest(handle_id=self._handle.handle_id),
                timeout=self._importer.limits.release_timeout_s,
            )
        except grpc.aio.AioRpcError as error:
            logger.warning("handle not released", extra={"reason": error.details()})
            return Fallback.HOLDER_UNREACHABLE
        return None if response.was_live else Fallback.LEASE_EXPIRED

    def _release_soon(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._importer.start(self._release_without_reading())

    async def _release_without_reading(self) -> None:
        await self._release()


def count_fallback(fallback: Fallback) -> None:
    metrics.KV_TRANSFER_FAILURES.add(1, {"reason": fallback.value})
    logger.warning("KV is computed again", extra={"reason": fallback.value})
