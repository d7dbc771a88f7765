"""Tells other machines' agents when the engines here have filled blocks."""

from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kv_transfer_svc.filling import Filling
from kv_transfer_svc.segments import SegmentTable
from kv_transfer_svc.transports.base import to_their_end

# Their threads sleep most of the time. What is beyond begins later.
_MAX_WAITS = 64


@dataclass(frozen=True, slots=True)
class Filled:
    """How many of the leading blocks are filled and, after the last one, what comes next."""

    num_blocks: int
    next_token_id: int | None = None


class FillWatch:
    """Owns the threads that wait."""

    def __init__(self, segments: SegmentTable) -> None:
        self._segments = segments
        self._threads = ThreadPoolExecutor(_MAX_WAITS, thread_name_prefix="kv-watch")
        self._watched: set[Filling] = set()

    async def follow(
        self, engine_id: str, block_ids: Sequence[int], generations: Sequence[int]
    ) -> AsyncGenerator[Filled, None]:
        """Each time that more are filled, up to the token after them.

        Raises KvTransferFailed when nobody will fill them.
        """
        with self._segments.in_use(engine_id) as (segment,):
            filling = Filling(segment, block_ids, generations)
            while not filling.is_complete:
                await self._run(filling, filling.wait_for_more)
                if not filling.is_complete:
                    yield Filled(filling.num_filled)
            token_id = await self._run(filling, filling.wait_for_token)
            yield Filled(filling.num_filled, token_id)

    async def _run(self, filling: Filling, wait: Callable[[], int | None]) -> int:
        waiting = self._threads.submit(lambda: wait() or 0)
        self._watched.add(filling)
        try:
            return await to_their_end([waiting], filling.stopping.set)
        finally:
            self._watched.discard(filling)

    def close(self) -> None:
        for filling in self._watched:
            filling.stopping.set()
        self._threads.shutdown(wait=True)
