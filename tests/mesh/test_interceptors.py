import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
import pytest

from mesh.client import mesh_errors
from mesh.errors import (
    InternalError,
    InvalidRequest,
    KvLeaseExpired,
    MeshError,
    QueueFull,
    WorkerUnavailable,
)
from mesh.telemetry import request_id_var
from tests.loop_clock import LoopClock
from tests.mesh.echo import serving

pytestmark = pytest.mark.usefixtures("transport")

KINDS = ["UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream"]


def failing(kind: str, make: Callable[[], BaseException]) -> Any:
    """A handler of that kind that raises; streams yield one message before."""
    if kind.endswith("Unary"):

        async def unary(request: Any, context: Any) -> bytes:
            raise make()

        return unary

    async def stream(request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        yield b"first"
        raise make()

    return stream


def echoing(kind: str, seen: list[Any], read: Callable[[], Any]) -> Any:
    if kind.endswith("Unary"):

        async def unary(request: Any, context: Any) -> bytes:
            seen.append(read())
            return b"done"

        return unary

    async def stream(request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        seen.append(read())
        yield b"done"

    return stream


@pytest.mark.parametrize("kind", KINDS)
async def test_mesh_errors_keep_their_type_across_the_wire(kind: str) -> None:
    def error() -> MeshError:
        return QueueFull("full", param="model", retry_after_s=3.0)

    async with serving(**{kind: failing(kind, error)}) as stub:
        with pytest.raises(QueueFull, match=r"^full$") as caught, mesh_errors():
            await stub.call(kind)

    assert caught.value.param == "model"
    assert caught.value.retry_after_s == 3.0


async def test_messages_before_a_mid_stream_error_arrive() -> None:
    behavior = failing("UnaryStream", lambda: KvLeaseExpired("handle h1 expired"))

    async with serving(UnaryStream=behavior) as stub:
        call = stub.unary_stream(b"x", timeout=10)
        assert await call.read() == b"first"
        with pytest.raises(KvLeaseExpired, match="handle h1 expired"), mesh_errors():
            await call.read()


# GR-04
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, KeyError, TimeoutError])
async def test_bugs_are_internal_with_a_fixed_message_at_once(
    kind: str, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(**{kind: failing(kind, lambda: error("secret"))}) as stub:
        async with LoopClock() as clock:
            with pytest.raises(InternalError, match=r"^internal error$"), mesh_errors():
                await stub.call(kind)
        assert clock.now_s < 1

    assert "secret" in caplog.text


async def test_errors_of_the_next_hop_pass_through_with_their_meaning() -> None:
    async def relay(request: bytes, context: Any) -> bytes:
        await next_hop.call("UnaryUnary")
        return b""

    refuse = failing("UnaryUnary", lambda: QueueFull("full", retry_after_s=1.5))
    async with serving(UnaryUnary=refuse) as next_hop, serving(UnaryUnary=relay) as stub:
        with pytest.raises(QueueFull) as caught, mesh_errors():
            await stub.call("UnaryUnary")

    assert caught.value.retry_after_s == 1.5


async def test_a_handlers_own_abort_is_left_alone() -> None:
    async def abort(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.DATA_LOSS, "lost")
        return b""

    async with serving(UnaryUnary=abort) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.call("UnaryUnary")

    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DATA_LOSS, "lost")


@pytest.mark.parametrize("kind", KINDS)
async def test_request_id_reaches_handlers_of_every_kind(kind: str) -> None:
    seen: list[str] = []
    token = request_id_var.set("req-1")

    async with serving(**{kind: echoing(kind, seen, request_id_var.get)}) as stub:
        assert await stub.call(kind) == [b"done"]
        request_id_var.reset(token)
        await stub.call(kind)

    assert seen == ["req-1", ""]


async def test_overlong_request_ids_are_cut() -> None:
    seen: list[str] = []
    behavior = echoing("UnaryUnary", seen, request_id_var.get)

    async with serving(UnaryUnary=behavior) as stub:
        await stub.unary_unary(b"x", metadata=(("x-request-id", "i" * 5000),))

    assert seen == ["i" * 128]


# GR-03
async def test_cancelling_runs_the_handlers_finally_and_blocks_nobody() -> None:
    num_waiting, num_aborted = 0, 0
    all_waiting, all_aborted, may_finish = (asyncio.Event() for _ in range(3))

    async def stream(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        nonlocal num_waiting, num_aborted
        yield b"first"
        num_waiting += 1
        if num_waiting == 20:
            all_waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            num_aborted += 1
            if num_aborted == 20:
                all_aborted.set()
            await may_finish.wait()

    async def unary(request: bytes, context: Any) -> bytes:
        return b"done"

    async with serving(UnaryStream=stream, UnaryUnary=unary) as stub:
        calls = [stub.unary_stream(b"x") for _ in range(20)]
        for call in calls:
            await call.read()
        await all_waiting.wait()

        for call in calls:
            call.cancel()

        async with asyncio.timeout(20):
            await all_aborted.wait()
            for _ in range(4):
                assert await stub.call("UnaryUnary") == [b"done"]
        may_finish.set()


async def test_cancelling_during_a_write_closes_the_generator_at_once() -> None:
    """A caller that does not read fills the window, so the handler is inside a write."""
    is_closed = asyncio.Event()
    num_yielded = 0

    async def stream(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        nonlocal num_yielded
        try:
            while True:
                num_yielded += 1
                yield bytes(100_000)
        finally:
            is_closed.set()

    async with serving(UnaryStream=stream) as stub:
        call = stub.unary_stream(b"x")
        await call.read()
        before = -1
        while before != num_yielded:
            before = num_yielded
            await asyncio.sleep(0.05)

        call.cancel()

        async with asyncio.timeout(20):
            await is_closed.wait()


async def test_client_and_bidi_streams_are_cancelled_too() -> None:
    aborted = {"StreamUnary": asyncio.Event(), "StreamStream": asyncio.Event()}
    started = {"StreamUnary": asyncio.Event(), "StreamStream": asyncio.Event()}

    async def stream_unary(requests: Any, context: Any) -> bytes:
        try:
            async for _ in requests:
                started["StreamUnary"].set()
        finally:
            aborted["StreamUnary"].set()
        return b""

    async def stream_stream(requests: Any, context: Any) -> AsyncGenerator[bytes, None]:
        try:
            async for request in requests:
                started["StreamStream"].set()
                yield request
        finally:
            aborted["StreamStream"].set()

    async with serving(StreamUnary=stream_unary, StreamStream=stream_stream) as stub:
        for kind, method in (
            ("StreamUnary", stub.stream_unary),
            ("StreamStream", stub.stream_stream),
        ):
            call = method()
            await call.write(b"x")
            await started[kind].wait()
            call.cancel()
            async with asyncio.timeout(20):
                await aborted[kind].wait()


async def test_an_expired_deadline_cancels_the_handler() -> None:
    is_aborted = asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            is_aborted.set()
        return b""

    async with serving(UnaryUnary=wait) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.unary_unary(b"x", timeout=0.05)
        async with asyncio.timeout(20):
            await is_aborted.wait()

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_clean_up_that_fails_after_a_cancel_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_started, is_done = asyncio.Event(), asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        context.add_done_callback(lambda _: is_done.set())
        is_started.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("cannot release")
        return b""

    async with serving(UnaryUnary=wait) as stub:
        call = stub.unary_unary(b"x")
        await is_started.wait()
        call.cancel()
        async with asyncio.timeout(20):
            await is_done.wait()

    messages = [record.message for record in caplog.records if record.name == "mesh.interceptors"]
    assert messages == ["error while being cancelled"]


async def test_a_call_once_accepted_is_never_sent_twice() -> None:
    num_calls = 0

    async def refuse(request: bytes, context: Any) -> bytes:
        nonlocal num_calls
        num_calls += 1
        raise WorkerUnavailable("draining")

    async with serving(UnaryUnary=refuse) as stub:
        with pytest.raises(WorkerUnavailable), mesh_errors():
            await stub.call("UnaryUnary")

    assert num_calls == 1


async def test_calls_are_logged_at_debug_and_only_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ok: list[Any] = []
    behaviors = {
        "UnaryUnary": echoing("UnaryUnary", ok, lambda: None),
        "UnaryStream": failing("UnaryStream", lambda: InvalidRequest("no")),
    }
    async with serving(**behaviors) as stub:
        caplog.set_level(logging.INFO, "mesh.interceptors")
        await stub.call("UnaryUnary")
        assert not caplog.records

        caplog.set_level(logging.DEBUG, "mesh.interceptors")
        await stub.call("UnaryUnary")
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.call("UnaryStream")

    records = [record for record in caplog.records if record.name == "mesh.interceptors"]
    # The end of the offer of local calls is logged as well.
    lines = [vars(one) for one in records if vars(one)["rpc"].startswith("/test.Echo/")]
    assert [(line["rpc"], line["outcome"]) for line in lines] == [
        ("/test.Echo/UnaryUnary", "OK"),
        ("/test.Echo/UnaryStream", "InvalidRequest"),
    ]
    assert all(line["duration_ms"] >= 0 for line in lines)


async def test_unknown_methods_are_unimplemented() -> None:
    async with serving() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.unary_unary(b"x", timeout=10)

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
