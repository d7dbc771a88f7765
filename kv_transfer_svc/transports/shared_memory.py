"""Blocks between two engines of one machine: a single copy from mapping to mapping."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kv_transfer_svc.runs import BlockRun
from kv_transfer_svc.segments import Segment
from kv_transfer_svc.transports.base import to_their_end


class SharedMemoryTransport:
    """Owns the threads that copy; they do so without the interpreter's lock."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-copy")

    async def copy(self, source: Segment, destination: Segment, runs: Sequence[BlockRun]) -> int:
        copying = self._threads.submit(copy_runs, source, destination, runs)
        # Only a copy that no thread has begun can be stopped.
        return await to_their_end([copying], stop=copying.cancel)

    def close(self) -> None:
        self._threads.shutdown(wait=True)


def copy_runs(source: Segment, destination: Segment, runs: Sequence[BlockRun]) -> int:
    """The copy itself; returns the bytes written."""
    num_bytes = 0
    for run in runs:
        source.make_resident(run.source, run.num_blocks, for_writing=False)
        destination.make_resident(run.destination, run.num_blocks, for_writing=True)
        written = destination.blocks[run.destination : run.destination + run.num_blocks]
        # numpy releases the lock here, which a memoryview's assignment does not.
        np.copyto(written, source.blocks[run.source : run.source + run.num_blocks])
        num_bytes += written.nbytes
    return num_bytes
