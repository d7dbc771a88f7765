"""The copy itself, from one mapping to another: of blocks that are there, or as they come."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kv_transfer_svc.filling import Filling
from kv_transfer_svc.runs import BlockRun, to_runs
from kv_transfer_svc.segments import Segment
from mesh.telemetry import Stopwatch

_COURTESY_S = 0.003


def copy_runs(source: Segment, destination: Segment, runs: Sequence[BlockRun]) -> int:
    """Copy without the interpreter's lock; returns the bytes written."""
    num_bytes = 0
    for run in runs:
        _make_resident(source, destination, run)
        written = destination.blocks[run.destination : run.destination + run.num_blocks]
        # numpy releases the lock here, which a memoryview's assignment does not.
        np.copyto(written, source.blocks[run.source : run.source + run.num_blocks])
        num_bytes += written.nbytes
    return num_bytes


@dataclass(eq=False)
class CopyProgress:
    """What a copy has come to so far."""

    num_bytes: int = 0
    num_runs: int = 0
    # Without waits for blocks to be filled.
    copy_s: float = 0.0
    # What was sampled after the last block.
    next_token_id: int | None = None


@dataclass(frozen=True)
class FollowingCopy:
    """A copy of blocks that are still being filled, in this order."""

    source: Segment
    destination: Segment
    source_ids: Sequence[int]
    destination_ids: Sequence[int]
    filling: Filling
    progress: CopyProgress

    def run(self) -> int:
        """Copy blocks as soon as they are filled, until all are; returns the bytes written."""
        progress = self.progress
        for run in self._runs(0, len(self.source_ids)):
            # While there is time.
            _make_resident(self.source, self.destination, run)
        while not self.filling.is_complete:
            start = self.filling.num_filled
            self.filling.wait_for_more()
            stopwatch = Stopwatch()
            runs = self._runs(start, self.filling.num_filled)
            progress.num_bytes += copy_runs(self.source, self.destination, runs)
            progress.copy_s += stopwatch.elapsed_s
            progress.num_runs += len(runs)
        # The last look at the generations is behind that.
        progress.next_token_id = self.filling.wait_for_token()
        announce(self.destination, self.destination_ids, progress.next_token_id)
        return progress.num_bytes

    def _runs(self, start: int, end: int) -> list[BlockRun]:
        return to_runs(
            self.source_ids[start:end],
            self.destination_ids[start:end],
            self.source.spec.num_blocks,
            self.destination.spec.num_blocks,
        )


def announce(destination: Segment, block_ids: Sequence[int], next_token_id: int) -> None:
    """Tell an engine that waits that its blocks are whole, from the thread that knows it."""
    if destination.fill_marks is not None:
        destination.fill_marks.announce(block_ids, next_token_id)
        # It is about to use the cores; what we still have to say is no news there.
        time.sleep(_COURTESY_S)


def _make_resident(source: Segment, destination: Segment, run: BlockRun) -> None:
    source.make_resident(run.source, run.num_blocks)
    destination.make_resident(run.destination, run.num_blocks)
