"""An OpenAI endpoint whose answers and pace a test decides."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Handler = Callable[[dict[str, Any], web.StreamResponse], Awaitable[None]]


class FakeEndpoint:
    """Streams `max_tokens` tokens, one event each; counts what it is asked."""

    def __init__(self, *, pause_s: float = 0.0, models: tuple[str, ...] = ("m",)) -> None:
        self.pause_s = pause_s
        self.models = models
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_active = 0
        self.max_active = 0
        self._changed = asyncio.Condition()
        self.url = ""
        # Replaces the answer's events.
        self.handler: Handler = self._answer
        self.status = 200

    async def models_route(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def route(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await self._count(1)
        try:
            await self.handler(body, response)
        finally:
            await self._count(-1)
        return response

    async def until_active(self, num: int) -> None:
        """Wait until exactly so many requests are being answered."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_active == num)

    async def _count(self, change: int) -> None:
        self.num_active += change
        self.max_active = max(self.max_active, self.num_active)
        async with self._changed:
            self._changed.notify_all()

    async def _answer(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        num_tokens = body["max_tokens"]
        is_chat = "messages" in body
        if is_chat:
            await send(response, chat_event({"role": "assistant", "content": ""}))
        for _ in range(num_tokens):
            await asyncio.sleep(self.pause_s)
            await send(response, chat_event({"content": "x"}) if is_chat else text_event("x"))
        await send(response, chat_event({}, "length") if is_chat else text_event("", "length"))
        prompt = body.get("prompt", "")
        await send(response, usage_event(len(prompt), num_tokens))
        await response.write(b"data: [DONE]\n\n")


def text_event(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def chat_event(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def usage_event(num_prompt: int, num_completion: int, num_cached: int = 0) -> dict[str, Any]:
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        },
    }


async def send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def serving(endpoint: FakeEndpoint) -> AsyncIterator[FakeEndpoint]:
    """Serve on a port of the loopback interface."""
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/completions", endpoint.route)
    app.router.add_post("/v1/chat/completions", endpoint.route)
    app.router.add_get("/v1/models", endpoint.models_route)
    # Handlers of clients that went away end with them.
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    endpoint.url = f"http://{host}:{port}"
    try:
        yield endpoint
    finally:
        await runner.cleanup()
