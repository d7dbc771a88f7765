"""Other machines' agents: where the blocks of their engines can be read."""

from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from kv_transfer_svc.fill_watch import Filled
from kv_transfer_svc.transports.base import MooncakeSource, RemoteSource
from mesh.client import Channels, mesh_errors
from mesh.errors import KvTransferFailed, MeshError
from mesh.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc

if TYPE_CHECKING:
    from mesh.v1.kv_transfer_pb2_grpc import KvTransferServiceAsyncStub

_TIMEOUT_S = 2.0
_MAX_REMEMBERED = 256


class Peers:
    """Asks agents where to read, once for each engine: a new process of an engine has a new id."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._sources: OrderedDict[tuple[str, str], RemoteSource] = OrderedDict()

    async def locate(self, address: str, engine_id: str) -> RemoteSource:
        """Where `engine_id` can be read; raises KvTransferFailed if its agent does not know it."""
        key = (address, engine_id)
        if (source := self._sources.get(key)) is None:
            source = await self._ask(address, engine_id)
            self._sources[key] = source
            if len(self._sources) > _MAX_REMEMBERED:
                self._sources.popitem(last=False)
        return source

    def forget(self, address: str, engine_id: str) -> None:
        """After a failure: the agent may have restarted, with another port and another token."""
        self._sources.pop((address, engine_id), None)

    async def watch(
        self, address: str, engine_id: str, block_ids: Sequence[int], generations: Sequence[int]
    ) -> AsyncGenerator[Filled, None]:
        """Each time that more of the leading blocks are filled, up to the token after them.

        Raises KvTransferFailed when the engine will not fill them.
        """
        stub: KvTransferServiceAsyncStub = kv_transfer_pb2_grpc.KvTransferServiceStub(
            self._channels.get(address)
        )
        request = kv_transfer_pb2.WatchBlocksRequest(
            engine_id=engine_id, block_ids=block_ids, generations=generations
        )
        call = stub.WatchBlocks(request)
        try:
            with mesh_errors():
                async for response in call:
                    next_token_id: int | None = None
                    if response.HasField("next_token_id"):
                        next_token_id = response.next_token_id
                    yield Filled(response.num_filled, next_token_id)
        except MeshError as error:
            raise KvTransferFailed(f"agent {address}: {error}") from error
        finally:
            call.cancel()

    async def _ask(self, address: str, engine_id: str) -> RemoteSource:
        stub: KvTransferServiceAsyncStub = kv_transfer_pb2_grpc.KvTransferServiceStub(
            self._channels.get(address)
        )
        try:
            with mesh_errors():
                response = await stub.Locate(
                    kv_transfer_pb2.LocateRequest(engine_id=engine_id), timeout=_TIMEOUT_S
                )
        except MeshError as error:
            raise KvTransferFailed(f"agent {address}: {error}") from error
        host = address.rpartition(":")[0].strip("[]")
        return RemoteSource(
            engine_id=engine_id,
            block_bytes=response.block_bytes,
            num_blocks=response.num_blocks,
            layout_fingerprint=response.layout_fingerprint,
            data_address=(host, response.data_port),
            token=response.token,
            uses_tls=response.uses_tls,
            layout=dict(response.layout),
            mooncake=_mooncake(response.mooncake) if response.HasField("mooncake") else None,
        )


def _mooncake(told: kv_transfer_pb2.MooncakeSource) -> MooncakeSource:
    offset = told.generations_offset if told.HasField("generations_offset") else None
    return MooncakeSource(told.rpc_port, told.address, offset)
