"""The answers a worker is streaming: coalesced, counted, and cut when a drain runs out of time."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Generic, Self, TypeVar

from mesh.errors import Draining, InternalError

T = TypeVar("T")


class EventStream(Generic[T]):
    """Reads a generator in its own task and hands over all that is queued, at once.

    A reader that is held up by a slow client then sends one larger message instead
    of one message behind another. Leaving the block closes the generator. The queue
    is bounded by what the generator can produce.
    """

    def __init__(self, events: AsyncGenerator[T, None]) -> None:
        self._events = events
        self._queued: list[T] = []
        self._error: Exception | None = None
        self._is_over = False
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._reader.cancel()
        await asyncio.wait({self._reader})

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[T]:
        """Everything queued, at least one event; raises what the generator raised."""
        await self._changed.wait()
        if self._queued:
            events, self._queued = self._queued, []
            if not self._is_over:
                self._changed.clear()
            return events
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    def fail(self, error: Exception) -> None:
        """End the stream with `error` once what is queued has been read."""
        if not self._is_over:
            self._end(error)
            self._reader.cancel()

    async def _read(self) -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    self._queued.append(event)
                    self._changed.set()
        except Exception as error:  # whatever it is belongs to the reader of the stream
            self._end(error)
        except asyncio.CancelledError:
            # Unless it is ours, a reader waits and would do so for ever.
            self._end(InternalError("the events were cancelled from within"))
            raise
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if not self._is_over:
            self._error = error
            self._is_over = True
            self._changed.set()


class ActiveStreams:
    """Every request a worker is answering: a drain refuses, waits for, and cuts them."""

    def __init__(self) -> None:
        self._streams: set[EventStream[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    def __len__(self) -> int:
        return len(self._streams)

    @asynccontextmanager
    async def open(self, events: AsyncGenerator[T, None]) -> AsyncIterator[EventStream[T]]:
        """Run a generator for as long as the block lasts; raises Draining in a drain."""
        if self._is_draining:
            await events.aclose()
            raise Draining("the worker is draining")
        async with EventStream(events) as stream:
            self._streams.add(stream)
            self._idle.clear()
            try:
                yield stream
            finally:
                self._streams.discard(stream)
                if not self._streams:
                    self._idle.set()

    def refuse_new(self) -> None:
        self._is_draining = True

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    def cut(self) -> None:
        """End all streams so that their callers go on elsewhere."""
        for stream in list(self._streams):
            stream.fail(Draining("the worker stopped before the request was finished"))
