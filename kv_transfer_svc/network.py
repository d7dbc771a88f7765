"""The way to blocks of other machines, and theirs to ours."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from kv_transfer_svc.fill_watch import Filled, FillWatch
from kv_transfer_svc.peers import Peers
from kv_transfer_svc.pulls import (
    Pull,
    TransportName,
    check_layouts,
    generations_of,
    to_pull_runs,
)
from kv_transfer_svc.segments import Segment
from kv_transfer_svc.transports.base import FollowingRead, RemoteSource, RemoteTransport
from kv_transfer_svc.transports.block_server import BlockServer
from kv_transfer_svc.transports.mooncake import MooncakeTransport
from kv_transfer_svc.transports.segment_copy import CopyProgress, announce
from kv_transfer_svc.transports.tcp import TcpTransport
from mesh.telemetry import Stopwatch


@dataclass(frozen=True, slots=True)
class Network:
    """Chooses how blocks come from another machine, and fetches them."""

    peers: Peers
    tcp: TcpTransport
    block_server: BlockServer
    fill_watch: FillWatch
    # Used where the other side has it too.
    mooncake: MooncakeTransport | None = None

    async def pull(self, pull: Pull, destination: Segment, progress: CopyProgress) -> TransportName:
        """Fill the destination's blocks; returns by which way."""
        source = await self.peers.locate(pull.source_address, pull.source_engine_id)
        check_layouts(source, destination.spec)
        runs = to_pull_runs(pull, source, destination)
        destination.check_size()
        if self.mooncake is not None and self.mooncake.is_usable and source.mooncake is not None:
            await self._read(self.mooncake, source, destination, pull, progress)
            return "mooncake"
        if not pull.follows:
            await self._read(self.tcp, source, destination, pull, progress)
            return "tcp"
        progress.num_runs = len(runs)
        on_arrival = partial(announce, destination, pull.destination_block_ids)
        await self.tcp.follow(
            FollowingRead(source, destination, runs, generations_of(pull), progress, on_arrival)
        )
        return "tcp"

    async def _read(
        self,
        transport: RemoteTransport,
        source: RemoteSource,
        destination: Segment,
        pull: Pull,
        progress: CopyProgress,
    ) -> None:
        """By a transport that reads what is there: as the source's agent tells that it is."""
        num_read = 0
        async with aclosing(self._filled(pull)) as changes:
            async for filled in changes:
                part = slice(num_read, filled.num_blocks)
                runs = to_pull_runs(pull, source, destination, part)
                stopwatch = Stopwatch()
                progress.num_bytes += await transport.read(
                    source, destination, runs, generations_of(pull)[part]
                )
                progress.copy_s += stopwatch.elapsed_s
                progress.num_runs += len(runs)
                progress.next_token_id = filled.next_token_id
                num_read = filled.num_blocks
        if destination.fill_marks is not None and progress.next_token_id is not None:
            destination.fill_marks.announce(pull.destination_block_ids, progress.next_token_id)

    async def _filled(self, pull: Pull) -> AsyncGenerator[Filled, None]:
        """How many of the blocks of a pull can be read on another machine, to the last one."""
        if not pull.follows:
            yield Filled(len(pull.source_block_ids))
            return
        progress = self.peers.watch(
            pull.source_address,
            pull.source_engine_id,
            pull.source_block_ids,
            pull.source_generations,
        )
        async with aclosing(progress):
            async for filled in progress:
                yield filled
