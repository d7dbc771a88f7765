"""What a way of moving blocks must do."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv_transfer_svc.runs import BlockRun
from kv_transfer_svc.segments import Segment
from kv_transfer_svc.transports.segment_copy import CopyProgress, FollowingCopy

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class MooncakeSource:
    """How a Mooncake Transfer Engine reads a segment of another agent."""

    rpc_port: int
    # Of the segment in the memory of that agent.
    address: int
    # None: the engine keeps no generations.
    generations_offset: int | None


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """An engine attached to another agent, and that agent's data port."""

    engine_id: str
    block_bytes: int
    num_blocks: int
    layout_fingerprint: str
    data_address: Address
    token: bytes
    uses_tls: bool
    # None: that agent does without.
    mooncake: MooncakeSource | None = None
    # What the fingerprint stands for, for messages.
    layout: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FollowingRead:
    """A read of blocks that the source is still filling, in this order."""

    source: RemoteSource
    destination: Segment
    runs: Sequence[BlockRun]
    # One for each block.
    generations: NDArray[np.uint32]
    progress: CopyProgress
    # To be called with the token after the last block, in a thread, when all have arrived.
    on_arrival: Callable[[int], None]


class Transport(Protocol):
    """Moves runs of blocks between two segments."""

    async def copy(self, source: Segment, destination: Segment, runs: Sequence[BlockRun]) -> int:
        """Return the bytes that were written, when the last of them is.

        The destination is not written to any more once the call has ended, in whichever way:
        cancelling it waits for the part in flight. Raises KvTransferFailed when not all arrived.
        """
        ...

    async def follow(self, copy: FollowingCopy) -> int:
        """The same for blocks that are still being filled."""
        ...


class RemoteTransport(Protocol):
    """Moves runs of blocks from another agent's segment into one of ours."""

    async def read(
        self,
        source: RemoteSource,
        destination: Segment,
        runs: Sequence[BlockRun],
        generations: NDArray[np.uint32],
    ) -> int:
        """As `Transport.copy`; also raises KvTransferFailed when a block was reused before the
        read or during it. Without generations, that is not checked."""
        ...


async def to_their_end(works: Sequence["Future[int]"], stop: Callable[[], object]) -> int:
    """Wait for threads' work even while being cancelled, and add up what it comes to.

    It may write to blocks that the caller reuses as soon as this returns. When one fails, or
    on a cancellation, `stop` makes the others end soon.
    """
    cancelled: asyncio.CancelledError | None = None
    failed: BaseException | None = None
    num_bytes = 0
    pending = {asyncio.wrap_future(work) for work in works}
    while pending:
        try:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as error:
            cancelled = error
            stop()
            continue
        for work in done:
            if work.cancelled():
                continue
            problem = work.exception()
            if problem is None:
                num_bytes += work.result()
            elif failed is None:
                failed = problem
                stop()
    if (end := cancelled or failed) is not None:
        raise end
    return num_bytes
