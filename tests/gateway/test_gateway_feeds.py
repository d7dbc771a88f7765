"""Tokens of a worker's decodes over one call, and what happens when that breaks."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.attempts import WorkerLost
from gateway.token_feeds import DecodeStream, TokenFeeds
from mesh.client import Channels
from mesh.errors import WorkerUnavailable
from mesh.v1 import decode_pb2, scheduler_pb2, types_pb2
from tests.gateway.fake_workers import Fault
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, events, eventually, text_of

CHAT = "/v1/chat/completions"
HELLO = "Hello, world!"


class ScriptedCall:
    """A decode's own call."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self) -> Any:
        return await self.messages.get()

    def cancel(self) -> bool:
        return True

    def first(self, *token_ids: int, is_fed: bool = True) -> None:
        tokens = types_pb2.TokenChunk(token_ids=token_ids)
        self.messages.put_nowait(decode_pb2.DecodeResponse(tokens=tokens, is_fed=is_fed))

    def finish(self, num_fed_tokens: int) -> None:
        finished = decode_pb2.DecodeFinished(num_fed_tokens=num_fed_tokens)
        self.messages.put_nowait(decode_pb2.DecodeResponse(finished=finished))


class ScriptedFeed:
    is_broken = False

    def add(self, sequence_id: int, stream: DecodeStream) -> None: ...

    def remove(self, sequence_id: int) -> None: ...


@pytest.fixture
def call() -> ScriptedCall:
    return ScriptedCall()


@pytest.fixture
def feed() -> ScriptedFeed:
    return ScriptedFeed()


@pytest_asyncio.fixture(loop_scope="module")
async def stream(call: ScriptedCall, feed: ScriptedFeed) -> AsyncIterator[DecodeStream]:
    made: Any = DecodeStream
    stream: DecodeStream = made(call, feed, 1)
    yield stream
    stream.close()


async def read(stream: DecodeStream) -> Any:
    return await stream.read(5, "w")


async def test_fed_tokens_that_overtake_the_first_ones_come_after_them(
    stream: DecodeStream, call: ScriptedCall
) -> None:
    stream.put(2)
    call.first(1)

    assert list((await read(stream)).tokens.token_ids) == [1]
    assert await read(stream) == [2]


async def test_tokens_that_waited_come_together(stream: DecodeStream, call: ScriptedCall) -> None:
    call.first(1)
    await read(stream)
    stream.put(2)
    stream.put(3)

    assert await read(stream) == [2, 3]


async def test_the_end_waits_for_tokens_on_their_way(
    stream: DecodeStream, call: ScriptedCall
) -> None:
    call.first(1)
    await read(stream)
    call.finish(num_fed_tokens=2)
    stream.put(2)
    assert await read(stream) == [2]
    reading = asyncio.create_task(read(stream))
    # The end is there, and it is not time for it.
    await asyncio.wait({reading}, timeout=0.02)
    assert not reading.done()
    stream.put(3)

    assert await reading == [3]
    assert (await read(stream)).HasField("finished")


async def test_tokens_that_never_come_are_a_lost_worker(
    stream: DecodeStream, call: ScriptedCall
) -> None:
    call.first(1)
    await read(stream)
    call.finish(num_fed_tokens=2)
    stream.put(2)
    assert await read(stream) == [2]

    with pytest.raises(WorkerLost, match="silent"):
        await stream.read(0.02, "w")


async def test_a_broken_feed_is_a_lost_worker_once_its_tokens_are_read(
    stream: DecodeStream, call: ScriptedCall, feed: ScriptedFeed
) -> None:
    call.first(1)
    await read(stream)
    stream.put(2)
    feed.is_broken = True
    stream.wake()

    assert await read(stream) == [2]
    with pytest.raises(WorkerLost, match="feed"):
        await read(stream)


async def test_a_broken_feed_is_nothing_to_a_decode_on_its_own_call(
    stream: DecodeStream, call: ScriptedCall, feed: ScriptedFeed
) -> None:
    feed.is_broken = True
    call.first(1, is_fed=False)
    call.first(2, is_fed=False)

    assert list((await read(stream)).tokens.token_ids) == [1]
    assert list((await read(stream)).tokens.token_ids) == [2]


async def open_feeds(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.decode.has_feeds = True
    # The first decode opens the feed, and does not wait for it.
    assert text_of(await events(http, CHAT, chat(stream=True))) == HELLO
    await eventually(lambda: mesh.decode.num_feeds == 1)


@pytest.mark.parametrize("after", [1, 2, 5])
async def test_a_decode_that_fails_behind_fed_tokens_goes_on_without_loss_or_repetition(
    http: httpx.AsyncClient, mesh: FakeMesh, after: int
) -> None:
    await open_feeds(http, mesh)
    mesh.decode.faults = [Fault(after=after, error=WorkerUnavailable("sick"))]

    assert text_of(await events(http, CHAT, chat(stream=True))) == HELLO


async def test_a_client_that_leaves_ends_a_fed_decode(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    await open_feeds(http, mesh)
    mesh.decode.was_active.clear()
    mesh.decode.steps = asyncio.Semaphore(3)
    async with http.stream("POST", CHAT, json=chat(stream=True)) as response:
        await anext(response.aiter_lines())
        await mesh.decode.was_active.wait()

    await mesh.quiet()


async def test_a_stream_goes_on_elsewhere_when_its_feed_breaks(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    await open_feeds(http, mesh)
    mesh.decode.steps = steps = asyncio.Semaphore(2)
    asking = asyncio.create_task(events(http, CHAT, chat(stream=True)))
    await mesh.decode.was_active.wait()
    await eventually(lambda: steps.locked())

    mesh.decode.break_feeds()

    assert text_of(await asking) == HELLO
    told = [one.failed for one in mesh.scheduler.told if one.HasField("failed")]
    assert [(one.worker_id, one.failure) for one in told] == [
        ("decode-0", scheduler_pb2.WORKER_FAILURE_LOST)
    ]


async def test_a_worker_without_feeds_is_asked_again_after_a_while() -> None:
    async with Channels() as channels:
        feeds = TokenFeeds(channels)
        # Nobody listens: whoever decodes finds out by itself.
        worker = scheduler_pb2.WorkerRef(worker_id="w", address="127.0.0.1:1")
        first = feeds.decode(worker, decode_pb2.DecodeRequest(), 5)
        with pytest.raises(WorkerLost):
            await first.read(5, "w")
        second = feeds.decode(worker, decode_pb2.DecodeRequest(), 5)
        with pytest.raises(WorkerLost):
            await second.read(5, "w")
        for stream in (first, second):
            stream.close()
        await feeds.close()
