"""One streamed completion against an OpenAI endpoint, every token with its time."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import orjson

from mesh.bench.sse import SseDecoder, SseEvent

Api = Literal["completions", "chat"]

_CONNECT_TIMEOUT_S = 30.0
# Between two reads; a prompt of many thousand tokens may take minutes on a CPU.
_READ_TIMEOUT_S = 600.0
_MAX_ERROR_CHARS = 300


@dataclass(frozen=True)
class Endpoint:
    """Where requests go, and what they all have in common."""

    # Up to, and without, `/v1`.
    url: str
    model: str
    api: Api = "completions"
    api_key: str | None = None
    # Without it a model may end early, and runs differ in length.
    ignore_eos: bool = True
    # Some servers cannot serve a second request on a connection that has streamed.
    reuses_connections: bool = False
    # More fields of the body; they win over ours.
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedRequest:
    """What to ask. `prompt` is text or token ids; chats may have a system message."""

    prompt: str | list[int]
    max_tokens: int
    system: str | None = None
    # Requests of one group are measured together.
    group: str = "requests"


@dataclass
class Recording:
    """What happened to one request; filled in as it happens, so that a cut leaves what was."""

    group: str
    started_at: float
    # One per event that carries a token or more.
    token_times: list[float] = field(default_factory=list)
    ended_at: float | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    # By the server's count; None where it gives none.
    num_completion_tokens: int | None = None
    # What the server had spent on each stage when it began to answer, if it says so.
    stages_ms: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    # The measurement ended first.
    was_cut: bool = False
    # Intended start to real start: how far the client lagged behind its own plan.
    late_s: float = 0.0

    @property
    def num_output_tokens(self) -> int:
        """Tokens that came; where the server does not count, events."""
        if self.num_completion_tokens is None:
            return len(self.token_times)
        return self.num_completion_tokens

    @property
    def is_complete(self) -> bool:
        return self.error is None and not self.was_cut


class OpenAiClient:
    """Sends planned requests; times with `time.perf_counter`."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        self._session = session
        self._endpoint = endpoint
        path = "/v1/chat/completions" if endpoint.api == "chat" else "/v1/completions"
        self._url = endpoint.url.rstrip("/") + path

    async def stream(self, request: PlannedRequest, recording: Recording) -> None:
        """Fill `recording`. A failure is its `error`; only cancellation is raised."""
        events: list[SseEvent] = []
        try:
            await self._read(request, recording, events)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            recording.error = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
        except asyncio.CancelledError:
            recording.was_cut = True
            raise
        finally:
            # Parsed when the stream is over, so that parsing delays no other stream's reads
            # more than once.
            _interpret(events, recording, self._endpoint.api)

    async def _read(
        self, request: PlannedRequest, recording: Recording, events: list[SseEvent]
    ) -> None:
        body = orjson.dumps(request_body(self._endpoint, request))
        headers = {"content-type": "application/json", **self._endpoint.headers}
        if self._endpoint.api_key is not None:
            headers["authorization"] = f"Bearer {self._endpoint.api_key}"
        decoder = SseDecoder()
        async with self._session.post(self._url, data=body, headers=headers) as response:
            if response.status != 200:
                text = await response.text()
                recording.error = f"HTTP {response.status}: {text[:_MAX_ERROR_CHARS]}"
                return
            recording.stages_ms = parse_server_timing(response.headers.get("server-timing", ""))
            async for chunk in response.content.iter_any():
                now = time.perf_counter()
                events += decoder.feed(chunk, now)
                recording.ended_at = now


def request_body(endpoint: Endpoint, request: PlannedRequest) -> dict[str, Any]:
    """The JSON body of a request."""
    body: dict[str, Any] = {
        "model": endpoint.model,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint.ignore_eos:
        body["ignore_eos"] = True
    if endpoint.api == "chat":
        messages = [{"role": "user", "content": request.prompt}]
        if request.system is not None:
            messages.insert(0, {"role": "system", "content": request.system})
        body["messages"] = messages
    else:
        body["prompt"] = request.prompt
    return body | dict(endpoint.extra_body)


@asynccontextmanager
async def open_client(endpoint: Endpoint) -> AsyncIterator[OpenAiClient]:
    """A client without a limit of connections; all are closed at the end."""
    connector = aiohttp.TCPConnector(limit=0, force_close=not endpoint.reuses_connections)
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_READ_TIMEOUT_S
    )
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield OpenAiClient(session, endpoint)


def parse_server_timing(server_timing: str) -> dict[str, float]:
    entries = (entry.partition(";dur=") for entry in server_timing.split(", ") if ";dur=" in entry)
    return {name: float(duration) for name, _, duration in entries}


def _interpret(events: list[SseEvent], recording: Recording, api: Api) -> None:
    is_done = has_finish_reason = False
    for event in events:
        if event.data == b"[DONE]":
            is_done = True
            continue
        try:
            message = orjson.loads(event.data)
        except orjson.JSONDecodeError:
            recording.error = f"not JSON: {event.data[:_MAX_ERROR_CHARS]!r}"
            return
        if message.get("error"):
            recording.error = f"in the stream: {message['error']}"[:_MAX_ERROR_CHARS]
            return
        _read_usage(message.get("usage"), recording)
        for choice in message.get("choices") or ():
            has_finish_reason |= choice.get("finish_reason") is not None
            if _carries_token(choice, api):
                recording.token_times.append(event.at)
    if recording.error is None and not recording.was_cut and not (is_done and has_finish_reason):
        recording.error = "the stream ended without its end"


def _read_usage(usage: Mapping[str, Any] | None, recording: Recording) -> None:
    if usage is None:
        return
    recording.num_prompt_tokens = usage.get("prompt_tokens")
    recording.num_completion_tokens = usage.get("completion_tokens")
    details = usage.get("prompt_tokens_details") or {}
    recording.num_cached_tokens = details.get("cached_tokens")


def _carries_token(choice: Mapping[str, Any], api: Api) -> bool:
    """Whether an event is a token's. A token's text may be empty: part of a character, say."""
    is_last = choice.get("finish_reason") is not None
    if api == "completions":
        return bool(choice.get("text")) or not is_last
    delta = choice.get("delta") or {}
    if any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls", "refusal")):
        return True
    # The first event says who speaks, before there is a token.
    return delta.get("content") == "" and not delta.get("role") and not is_last
