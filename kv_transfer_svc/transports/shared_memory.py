"""Blocks between two engines of one machine: a single copy from mapping to mapping."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kv_transfer_svc.filling import Filling
from kv_transfer_svc.runs import BlockRun
from kv_transfer_svc.segments import Segment
from kv_transfer_svc.transports import segment_copy
from kv_transfer_svc.transports.base import to_their_end
from kv_transfer_svc.transports.segment_copy import FollowingCopy

# Their threads sleep most of the time. What is beyond begins later.
_MAX_FOLLOWERS = 64


class SharedMemoryTransport:
    """Owns the threads that copy; they do so without the interpreter's lock."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-copy")
        # Others: who waits for blocks keeps nobody from copying those that are there.
        self._followers = ThreadPoolExecutor(_MAX_FOLLOWERS, thread_name_prefix="kv-follow")
        self._followed: set[Filling] = set()

    async def copy(self, source: Segment, destination: Segment, runs: Sequence[BlockRun]) -> int:
        copying = self._threads.submit(segment_copy.copy_runs, source, destination, runs)
        # Only a copy that no thread has begun can be stopped.
        return await to_their_end([copying], stop=copying.cancel)

    async def follow(self, copy: FollowingCopy) -> int:
        copying = self._followers.submit(copy.run)

        def stop() -> None:
            copy.filling.stopping.set()
            copying.cancel()

        self._followed.add(copy.filling)
        try:
            return await to_their_end([copying], stop)
        finally:
            self._followed.discard(copy.filling)

    def close(self) -> None:
        for filling in self._followed:
            filling.stopping.set()
        self._threads.shutdown(wait=True)
        self._followers.shutdown(wait=True)
