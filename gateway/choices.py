"""All choices of one request, running side by side."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self

from gateway.generation import Delta, Job
from gateway.pipeline import Pipeline
from mesh.v1 import types_pb2

# Deltas that wait for a slow client; then its choices wait too.
_MAX_BUFFERED = 16


@dataclass(frozen=True)
class ChoiceDelta:
    """What one choice produced."""

    index: int
    delta: Delta


class Choices:
    """Runs jobs and hands over their deltas as they come.

    Leaving the context stops every job and waits until it has given back what it held.
    """

    def __init__(self, pipeline: Pipeline, groups: Sequence[Sequence[Job]]) -> None:
        self._pipeline = pipeline
        self._groups = groups
        self._num_running = sum(map(len, groups))
        self._queue: asyncio.Queue[ChoiceDelta] = asyncio.Queue(_MAX_BUFFERED)
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: Exception | None = None
        # Wakes `next` when there is something other than a delta to know.
        self._changed = asyncio.Event()

    def start(self) -> Self:
        """Begin all jobs, in the current trace context; then enter, so that they end."""
        index = 0
        for group in self._groups:
            is_primed = asyncio.Event()
            for number, job in enumerate(group):
                running = self._run(index, job, is_primed, is_first=number == 0)
                self._tasks.append(asyncio.create_task(running))
                index += 1
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        # Most often none: a client that has the whole answer may ask for its account next.
        running = [task for task in self._tasks if not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.gather(*running, return_exceptions=True)

    async def next(self) -> ChoiceDelta | None:
        """The next delta, None when all choices are finished; raises what one of them raised.

        Cancelling it loses nothing.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if not self._queue.empty():
                return self._queue.get_nowait()
            if self._num_running == 0:
                return None
            self._changed.clear()
            await self._changed.wait()

    def fail(self, error: Exception) -> None:
        """Stop everything: `next` raises `error`."""
        if self._failure is None:
            self._failure = error
        self._changed.set()

    async def _run(self, index: int, job: Job, is_primed: asyncio.Event, *, is_first: bool) -> None:
        try:
            if not is_first:
                # The others find the prompt in the prefix cache.
                await is_primed.wait()
            async with aclosing(self._pipeline.generate(job)) as deltas:
                async for delta in deltas:
                    await self._hand_over(ChoiceDelta(index, delta), job)
                    if not is_primed.is_set():
                        is_primed.set()
                        # The first one is sent before this goes on to tell others of it.
                        await asyncio.sleep(0)
        except Exception as error:
            self.fail(error)
        finally:
            # From here on the request waits for the client alone.
            job.trace.timeline.enter(types_pb2.STAGE_WRITE)
            self._num_running -= 1
            self._changed.set()

    async def _hand_over(self, item: ChoiceDelta, job: Job) -> None:
        if self._queue.full():
            job.trace.timeline.enter(types_pb2.STAGE_WRITE)
            await self._queue.put(item)
            job.trace.timeline.enter(types_pb2.STAGE_NETWORK)
        else:
            self._queue.put_nowait(item)
        self._changed.set()
