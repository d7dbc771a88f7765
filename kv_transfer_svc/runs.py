"""Block ids of a transfer as runs of neighbours, checked before a byte moves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks that lie one after another on both sides, so that one copy moves them all."""

    source: int
    destination: int
    num_blocks: int


def to_runs(
    source_ids: Sequence[int],
    destination_ids: Sequence[int],
    num_source_blocks: int,
    num_destination_blocks: int,
) -> list[BlockRun]:
    """Pair the ids in order and merge neighbours.

    Raises InvalidRequest if they differ in number, lie outside their segment, or name a
    destination twice.
    """
    if len(source_ids) != len(destination_ids):
        raise InvalidRequest(
            f"{len(source_ids)} source blocks cannot fill {len(destination_ids)} destination blocks"
        )
    if not source_ids:
        return []
    sources = np.asarray(source_ids, dtype=np.int64)
    destinations = np.asarray(destination_ids, dtype=np.int64)
    _check_range(sources, num_source_blocks, "source")
    _check_range(destinations, num_destination_blocks, "destination")
    is_destination = np.zeros(num_destination_blocks, dtype=np.bool_)
    is_destination[destinations] = True
    if int(is_destination.sum()) != len(destinations):
        raise InvalidRequest("a destination block is named twice")
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(destinations) != 1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(sources)]
    return [
        BlockRun(int(sources[start]), int(destinations[start]), end - start)
        for start, end in zip(starts, ends, strict=True)
    ]


def split_runs(runs: Sequence[BlockRun], num_parts: int) -> list[list[BlockRun]]:
    """The runs, in order, as at most `num_parts` parts of about the same number of blocks."""
    num_blocks = sum(run.num_blocks for run in runs)
    part_size = -(-num_blocks // num_parts)
    parts: list[list[BlockRun]] = []
    room = 0
    for run in runs:
        start = 0
        while start < run.num_blocks:
            if room == 0:
                parts.append([])
                room = part_size
            count = min(room, run.num_blocks - start)
            parts[-1].append(BlockRun(run.source + start, run.destination + start, count))
            start += count
            room -= count
    return parts


def _check_range(block_ids: NDArray[np.int64], num_blocks: int, side: str) -> None:
    largest = int(block_ids.max())
    if largest >= num_blocks or int(block_ids.min()) < 0:
        raise InvalidRequest(f"{side} block {largest} is outside a segment of {num_blocks} blocks")
