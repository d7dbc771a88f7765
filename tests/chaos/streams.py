"""Sixteen streams, greedy and seeded, that exercise what a failover has to carry over."""

import asyncio
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.harness import MODEL

NUM_STREAMS = 16
_NUM_PROMPT_TIMES = 8
_NUM_TOKENS = 40
_TIMEOUT_S = 90.0

_TOPICS = (
    "lighthouse", "harbour", "orchard", "glacier", "library", "railway", "volcano", "monastery",
    "carpenter", "telescope", "marketplace", "submarine", "beekeeper", "desert", "violin", "castle",
)  # fmt: skip
# What a resumed request must go on with: counts of penalties, a stop string's first letters, the
# generator's position, log-probabilities.
_EXTRAS: dict[int, dict[str, Any]] = {
    1: {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    2: {"stop": ["e of"], "max_tokens": 60},
    3: {"logprobs": 2},
    5: {"repetition_penalty": 1.3},
    9: {"frequency_penalty": 0.8, "top_p": 0.9},
    10: {"stop": ["t th", "xyzzy"], "max_tokens": 60},
    11: {"logprobs": 2, "top_k": 40},
    13: {"min_p": 0.05, "presence_penalty": 0.5},
}


def body(number: int, cache_salt: str) -> dict[str, Any]:
    """Request `number` of the sixteen; the salt keeps caches of earlier rounds out of it."""
    topic = _TOPICS[number]
    prompt = f"Notes about the {topic}, by its keeper. " + (
        f"The {topic} was quiet that morning, and nobody had come yet. " * _NUM_PROMPT_TIMES
    )
    seeded = {"temperature": 0.8, "seed": 1000 + number}
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": _NUM_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "cache_salt": cache_salt,
        **(seeded if number >= NUM_STREAMS // 2 else {"temperature": 0}),
        **_EXTRAS.get(number, {}),
    }


@dataclass
class Answer:
    """What a client got."""

    text: str = ""
    finish_reason: str | None = None
    token_logprobs: list[Any] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    is_whole: bool = False
    duration_s: float = 0.0

    def differs_from(self, undisturbed: "Answer") -> str | None:
        """How it is not the answer that it should be; None if it is."""
        if self.error is not None:
            return f"error {self.error} after {len(self.text)} characters"
        if not self.is_whole:
            return f"ended without [DONE] after {len(self.text)} characters"
        names = ("text", "finish_reason", "prompt_tokens", "completion_tokens", "token_logprobs")
        for name in names:
            mine, theirs = getattr(self, name), getattr(undisturbed, name)
            if mine != theirs:
                return f"{name} is {mine!r}, undisturbed {theirs!r}"
        return None


class Streams:
    """The sixteen requests of one round, spread over gateways."""

    def __init__(self, urls: Sequence[str], cache_salt: str) -> None:
        self._urls = urls
        self._cache_salt = cache_salt
        self.answers = [Answer() for _ in range(NUM_STREAMS)]
        # Tokens, roughly, that each client has.
        self.num_deltas = [0] * NUM_STREAMS
        self._ended = [asyncio.Event() for _ in range(NUM_STREAMS)]

    def numbers_at(self, url: str) -> set[int]:
        """Which of them one gateway serves."""
        return {n for n in range(NUM_STREAMS) if self._url(n) == url}

    async def run(self) -> list[Answer]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits) as http:
            await asyncio.gather(*(self._run(http, number) for number in range(NUM_STREAMS)))
        return self.answers

    async def wait_for(self, numbers: Collection[int]) -> None:
        """Until these have ended."""
        await asyncio.gather(*(self._ended[number].wait() for number in numbers))

    def _url(self, number: int) -> str:
        return self._urls[number % len(self._urls)]

    async def _run(self, http: httpx.AsyncClient, number: int) -> None:
        answer = self.answers[number]
        started = time.monotonic()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._read(http, number, answer)
        except (httpx.HTTPError, TimeoutError) as error:
            answer.error = repr(error)
        finally:
            answer.duration_s = time.monotonic() - started
            self._ended[number].set()

    async def _read(self, http: httpx.AsyncClient, number: int, answer: Answer) -> None:
        def count() -> None:
            self.num_deltas[number] += 1

        await ask_one(http, self._url(number), body(number, self._cache_salt), answer, count)


async def ask_one(
    http: httpx.AsyncClient,
    url: str,
    asked: dict[str, Any],
    answer: Answer,
    on_delta: Callable[[], None] = lambda: None,
) -> None:
    """Fill `answer` as it comes."""
    async with http.stream("POST", f"{url}/v1/completions", json=asked) as response:
        if response.status_code != 200:
            answer.error = f"{response.status_code} {(await response.aread()).decode()}"
            return
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == line:
                continue
            if data == "[DONE]":
                answer.is_whole = True
                continue
            _take(answer, json.loads(data), on_delta)


def _take(answer: Answer, event: dict[str, Any], on_delta: Callable[[], None]) -> None:
    if "error" in event:
        answer.error = str(event["error"])
        return
    if usage := event.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
    for choice in event["choices"]:
        answer.text += choice["text"]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        if logprobs := choice.get("logprobs"):
            answer.token_logprobs += zip(
                logprobs["tokens"], logprobs["token_logprobs"], strict=True
            )
        on_delta()
