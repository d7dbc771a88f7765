"""Feeds over the wire: the tokens of several decodes on one call."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from engine.sampling import TokenLogprobs
from mesh.v1 import decode_pb2
from tests.scripted_engine import ScriptedEngineLoop, ScriptedRun
from tests.worker_wire import DecodeRig, decode_request, decode_stub, wait_until

if TYPE_CHECKING:
    from mesh.v1.decode_pb2_grpc import DecodeServiceAsyncStub as Stub
else:
    Stub = Any


@pytest.fixture
def engine() -> ScriptedEngineLoop:
    return ScriptedEngineLoop()


@pytest.fixture
async def rig(engine: ScriptedEngineLoop) -> DecodeRig:
    return DecodeRig(engine)


@pytest.fixture
async def stub(rig: DecodeRig) -> AsyncIterator[Stub]:
    async with decode_stub(rig) as stub:
        yield stub


async def open_feed(rig: DecodeRig, stub: Stub) -> Any:
    feed = stub.Feed(decode_pb2.FeedRequest(feed_id="f"))
    await wait_until(lambda: rig.feeds.get("f") is not None)
    return feed


def fed_request(sequence_id: int) -> decode_pb2.DecodeRequest:
    request = decode_request(prompt=[5, 6])
    request.feed_id, request.feed_sequence_id = "f", sequence_id
    return request


async def begin(
    stub: Stub, engine: ScriptedEngineLoop, request: decode_pb2.DecodeRequest
) -> tuple[ScriptedRun, Any, decode_pb2.DecodeResponse]:
    """A decode with its first token."""
    events = aiter(stub.Decode(request, timeout=20))
    run = await engine.next_run()
    run.token(1)
    return run, events, await anext(events)


async def fed(feed: Any, num_tokens: int) -> list[tuple[int, int]]:
    tokens: list[tuple[int, int]] = []
    while len(tokens) < num_tokens:
        message = await asyncio.wait_for(feed.read(), 20)
        tokens += zip(message.sequence_ids, message.token_ids, strict=True)
    return tokens


async def test_tokens_after_the_first_come_through_the_feed(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    feed = await open_feed(rig, stub)
    one, one_events, one_first = await begin(stub, engine, fed_request(11))
    two, two_events, two_first = await begin(stub, engine, fed_request(22))

    one.token(2)
    two.token(3)
    one.finish(4)
    two.finish(5)
    tokens = await fed(feed, 4)
    [one_last] = [event async for event in one_events]
    [two_last] = [event async for event in two_events]

    assert one_first.is_fed
    assert two_first.is_fed
    assert [token for sequence_id, token in tokens if sequence_id == 11] == [2, 4]
    assert [token for sequence_id, token in tokens if sequence_id == 22] == [3, 5]
    assert one_last.finished.num_fed_tokens == two_last.finished.num_fed_tokens == 2


async def test_without_an_open_feed_tokens_come_on_the_call(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    run, events, first = await begin(stub, engine, fed_request(11))
    run.finish(2)
    second, last = [event async for event in events]

    assert not first.is_fed
    assert list(second.tokens.token_ids) == [2]
    assert last.finished.num_fed_tokens == 0


async def test_log_probabilities_come_on_the_call(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    await open_feed(rig, stub)
    request = fed_request(11)
    request.sampling_params.num_logprobs = 0
    run, events, first = await begin(stub, engine, request)
    run.token(2, TokenLogprobs(2, -0.5, ()))
    second = await anext(events)
    run.finish(3)

    assert not first.is_fed
    assert second.tokens.logprobs[0].logprob == pytest.approx(-0.5)
    assert len([event async for event in events]) == 2


@pytest.mark.parametrize("feed_id", ["", "f"])
async def test_a_feed_needs_an_id_of_its_own(rig: DecodeRig, stub: Stub, feed_id: str) -> None:
    await open_feed(rig, stub)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Feed(decode_pb2.FeedRequest(feed_id=feed_id)).read()

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_cancelled_feed_is_forgotten_and_its_decodes_go_on(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    feed = await open_feed(rig, stub)
    run, events, _ = await begin(stub, engine, fed_request(11))

    feed.cancel()
    await wait_until(lambda: rig.feeds.get("f") is None)
    run.finish(2)
    [last] = [event async for event in events]

    # Its caller counts what it got, and knows that something is missing.
    assert last.finished.num_fed_tokens == 1


async def test_closing_ends_feeds_behind_what_they_hold(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    feed = await open_feed(rig, stub)
    run, events, _ = await begin(stub, engine, fed_request(11))
    run.finish(2)
    assert len([event async for event in events]) == 1

    rig.feeds.close()

    assert await fed(feed, 1) == [(11, 2)]
    assert await feed.read() is grpc.aio.EOF
