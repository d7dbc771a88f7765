"""The end of a request whose client leaves, without a server."""

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway.middleware import DisconnectMiddleware

_SCOPE: Scope = {"type": "http"}


class Client:
    """Sends a body and, once told to, is gone."""

    def __init__(self) -> None:
        self.has_left = asyncio.Event()
        self._messages: list[Message] = [{"type": "http.request", "body": b"{}"}]

    async def receive(self) -> Message:
        if self._messages:
            return self._messages.pop()
        await self.has_left.wait()
        return {"type": "http.disconnect"}


class Handler:
    """Reads the body, and works until it is cancelled."""

    def __init__(self) -> None:
        self.works = asyncio.Event()
        self.was_cancelled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        self.works.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.was_cancelled = True


async def send(message: Message) -> None:
    raise AssertionError("nobody answers")


async def test_client_that_leaves_ends_its_handler_and_nothing_else() -> None:
    client, handler = Client(), Handler()

    async def serve() -> int:
        await DisconnectMiddleware(handler)(_SCOPE, client.receive, send)
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    serving = asyncio.create_task(serve())
    await handler.works.wait()
    client.has_left.set()

    assert await asyncio.wait_for(serving, 20) == 0
    assert handler.was_cancelled


async def test_work_behind_a_whole_answer_is_done_though_the_client_has_left() -> None:
    client, is_done = Client(), False

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal is_done
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        for _ in range(9):
            await asyncio.sleep(0)
        is_done = True

    async def send_and_disconnect(message: Message) -> None:
        if message["type"] == "http.response.body":
            client.has_left.set()

    middleware = DisconnectMiddleware(handler)
    await asyncio.wait_for(middleware(_SCOPE, client.receive, send_and_disconnect), 20)

    assert is_done


async def test_server_that_cancels_a_request_is_obeyed() -> None:
    client, handler = Client(), Handler()
    middleware = DisconnectMiddleware(handler)

    serving = asyncio.create_task(middleware(_SCOPE, client.receive, send))
    await handler.works.wait()
    serving.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(serving, 20)
    assert handler.was_cancelled
