"""The two ways to answer a generation: as a whole, or as a stream of events."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.types import Send

from gateway import sse
from gateway.choices import ChoiceDelta, Choices
from gateway.errors import OK, to_answer
from gateway.generation import Job
from gateway.openai.api import Api, ApiRequest, usage_object
from gateway.openai.responses import Usage
from gateway.patience import Patience
from gateway.record import RequestRecord


class Answer:
    """What both ways have in common: names, choices, usage."""

    def __init__(
        self,
        api: Api,
        request: ApiRequest,
        model: str,
        record: RequestRecord,
        jobs: Sequence[Job],
    ) -> None:
        self._request = request
        # As the client calls it, which rules may have rewritten.
        self._model = model
        self._record = record
        self._choices = [request.choice(index, job) for index, job in enumerate(jobs)]
        self._id = api.id_prefix + record.request_id
        self._created = int(time.time())
        self._api = api

    def _object(self, kind: str, choices: Sequence[Mapping[str, object]]) -> dict[str, Any]:
        made = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if (tier := self._request.served_tier()) is not None:
            made["service_tier"] = tier
        return made

    def _usage(self) -> Usage:
        counts = self._record.counts()
        return usage_object(counts.prompt_tokens, counts.completion_tokens, counts.cached_tokens)


class WholeAnswer(Answer):
    """Waits for all choices and sends one JSON object."""

    async def send(self, choices: Choices, send: Send) -> None:
        while (item := await choices.next()) is not None:
            self._record.note(item.index, item.delta)
            self._choices[item.index].add(item.delta)
        body = self._object(
            self._api.answer_object, [choice.answer() for choice in self._choices]
        ) | {"usage": self._usage()}
        await send_json(send, OK, body, {"server-timing": self._record.server_timing()})


class EventStream(Answer):
    """Sends an event for each delta, and comments while there is none.

    The response starts with the first delta, so that a failure before it keeps its
    status; after `header_wait_s` without one it starts anyway.
    """

    def __init__(
        self,
        api: Api,
        request: ApiRequest,
        model: str,
        record: RequestRecord,
        jobs: Sequence[Job],
        *,
        header_wait_s: float,
        keep_alive_interval_s: float,
    ) -> None:
        super().__init__(api, request, model, record, jobs)
        self._header_wait_s = header_wait_s
        self._keep_alive_interval_s = keep_alive_interval_s
        self._has_started = False

    @property
    def has_started(self) -> bool:
        """The status is sent: what fails from now on is an event."""
        return self._has_started

    async def send(self, choices: Choices, send: Send) -> None:
        """Stream until all choices end; raises what one of them raised."""
        patience = Patience()
        try:
            while (item := await self._next(choices, send, patience)) is not None:
                await self._write(send, self._events(item))
        finally:
            patience.close()
        last = sse.event(self._usage_chunk()) if self._request.includes_usage() else b""
        await self._write(send, last + sse.DONE, is_last=True)

    async def send_error(self, error: Exception, send: Send) -> None:
        """End a stream that has started: never with a finish reason."""
        await self._write(send, sse.event(to_answer(error).body) + sse.DONE, is_last=True)

    async def _next(self, choices: Choices, send: Send, patience: Patience) -> ChoiceDelta | None:
        while True:
            wait_s = self._keep_alive_interval_s if self._has_started else self._header_wait_s
            try:
                with patience.for_(wait_s):
                    return await choices.next()
            except TimeoutError:
                await self._write(send, sse.KEEP_ALIVE)

    def _events(self, item: ChoiceDelta) -> bytes:
        self._record.note(item.index, item.delta)
        return b"".join(
            sse.event(self._chunk([choice]))
            for choice in self._choices[item.index].chunks(item.delta)
        )

    def _chunk(self, choices: Sequence[Mapping[str, object]]) -> dict[str, Any]:
        chunk = self._object(self._api.chunk_object, choices)
        if self._request.has_continuous_usage():
            chunk["usage"] = self._usage()
        elif self._request.includes_usage():
            chunk["usage"] = None
        return chunk

    def _usage_chunk(self) -> dict[str, Any]:
        return self._object(self._api.chunk_object, []) | {"usage": self._usage()}

    async def _write(self, send: Send, events: bytes, *, is_last: bool = False) -> None:
        if not events:
            return
        if not self._has_started:
            self._has_started = True
            timing = (b"server-timing", self._record.server_timing().encode())
            headers = [*sse.HEADERS, timing]
            await send({"type": "http.response.start", "status": OK, "headers": headers})
        await send({"type": "http.response.body", "body": events, "more_body": not is_last})


async def send_json(
    send: Send, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> None:
    """One JSON response."""
    payload = orjson.dumps(body)
    raw = [
        *((name.encode(), value.encode()) for name, value in (headers or {}).items()),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(payload)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": payload})
