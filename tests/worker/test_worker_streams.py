"""Streams of a worker: coalesced, closed with their block, cut by a drain."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from mesh.errors import InternalError, WorkerUnavailable
from worker.streams import ActiveStreams, EventStream


class Source:
    """A generator fed by the test, which knows whether it was closed."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[int | BaseException | None] = asyncio.Queue()
        self.closed = asyncio.Event()

    async def generate(self) -> AsyncGenerator[int, None]:
        try:
            while (item := await self.items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.closed.set()

    def put(self, *items: int | BaseException | None) -> None:
        for item in items:
            self.items.put_nowait(item)


async def test_everything_queued_comes_at_once_and_in_order() -> None:
    source = Source()
    async with EventStream(source.generate()) as stream:
        source.put(1, 2, 3)
        first = await anext(stream)
        source.put(4, None)
        rest = [batch async for batch in stream]

    assert first == [1, 2, 3]
    assert rest == [[4]]


async def test_what_came_before_an_error_is_not_lost() -> None:
    source = Source()
    async with EventStream(source.generate()) as stream:
        source.put(1, ValueError("broken"))

        assert await anext(stream) == [1]
        with pytest.raises(ValueError, match="broken"):
            await anext(stream)


async def test_leaving_the_block_closes_the_generator() -> None:
    source = Source()
    async with EventStream(source.generate()) as stream:
        source.put(1)
        await anext(stream)

    assert source.closed.is_set()


async def test_failed_stream_raises_and_closes_its_generator() -> None:
    source = Source()
    async with EventStream(source.generate()) as stream:
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)

        stream.fail(WorkerUnavailable("cut"))

        with pytest.raises(WorkerUnavailable):
            await waiting
        await asyncio.wait_for(source.closed.wait(), 20)


async def test_generator_that_cancels_itself_does_not_leave_its_reader_waiting() -> None:
    source = Source()
    async with EventStream(source.generate()) as stream:
        source.put(asyncio.CancelledError())

        with pytest.raises(InternalError):
            await asyncio.wait_for(anext(stream), 20)


async def test_drain_refuses_new_streams_and_waits_for_running_ones() -> None:
    streams = ActiveStreams()
    source = Source()
    async with streams.open(source.generate()) as stream:
        idle = asyncio.ensure_future(streams.wait_until_idle())
        streams.refuse_new()
        with pytest.raises(WorkerUnavailable):
            async with streams.open(Source().generate()):
                pytest.fail("admitted in a drain")
        assert not idle.done()
        source.put(1, None)
        assert [batch async for batch in stream] == [[1]]

    await asyncio.wait_for(idle, 20)


async def test_cut_ends_every_stream_with_a_reason_to_go_elsewhere() -> None:
    streams = ActiveStreams()
    sources = [Source(), Source()]
    async with (
        streams.open(sources[0].generate()) as first,
        streams.open(sources[1].generate()) as second,
    ):
        streams.cut()

        for stream in (first, second):
            with pytest.raises(WorkerUnavailable):
                await anext(stream)

    assert len(streams) == 0
