"""What is asked: chats, agents with a shared prefix, long prompts amid streams, recorded traces."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from mesh.bench.client import Api, PlannedRequest
from mesh.bench.prompts import Lengths, PromptMaker, Vocabulary

REQUESTS = "requests"
STREAMS = "decoding streams"
LONG_PROMPTS = "long prompts"

Requests = Callable[[object], Iterator[PlannedRequest]]


class TraceError(Exception):
    """A trace cannot be replayed; the message says where and why."""


@dataclass(frozen=True)
class Intruders:
    """Requests that come one at a time beside the others."""

    requests: Requests
    # From one's start to the next one's, unless it takes longer.
    every_s: float
    # Undisturbed time at the beginning.
    delay_s: float = 2.0


@dataclass(frozen=True)
class Workload:
    """Requests without end, drawn from a seed, and what a report says about them."""

    name: str
    # The group whose numbers come first.
    group: str
    requests: Requests
    input_lengths: str
    output_lengths: str
    # What caches know of the prompts.
    cache_state: str
    # Sent once before a round, unmeasured.
    warm_up: Requests | None = None
    intruders: Intruders | None = None
    # Tokens of the shortest prompt that the main group sends.
    least_input_tokens: int = 1


@dataclass(frozen=True)
class TimedRequest:
    """A request and its place in time, in seconds from the beginning."""

    at_s: float
    request: PlannedRequest


def chat(vocabulary: Vocabulary, api: Api, inputs: Lengths, outputs: Lengths) -> Workload:
    """Short prompts that nobody has asked before (W1)."""

    def requests(seed: object) -> Iterator[PlannedRequest]:
        maker = PromptMaker(vocabulary, seed)
        while True:
            num_tokens = inputs.draw(maker.random)
            yield PlannedRequest(_prompt(maker, api, num_tokens), outputs.draw(maker.random))

    return Workload(
        "chat",
        REQUESTS,
        requests,
        str(inputs),
        str(outputs),
        "prompts are new to every cache",
        least_input_tokens=inputs.low,
    )


def agent(
    vocabulary: Vocabulary, api: Api, num_shared: int, own: Lengths, outputs: Lengths
) -> Workload:
    """A long prefix that all share, then something of one's own (W2)."""

    def requests(seed: object) -> Iterator[PlannedRequest]:
        maker = PromptMaker(vocabulary, seed)
        # Another one each time the command runs; the rounds of a run share it.
        shared = PromptMaker(vocabulary, _first(seed))
        prefix = shared.text(num_shared) if api == "chat" else shared.prompt(num_shared)
        while True:
            tail = _prompt(maker, api, own.draw(maker.random))
            max_tokens = outputs.draw(maker.random)
            if api == "chat":
                assert isinstance(prefix, str)
                yield PlannedRequest(tail, max_tokens, system=prefix)
            else:
                yield PlannedRequest(_joined(prefix, tail), max_tokens)

    return Workload(
        "agent",
        REQUESTS,
        requests,
        f"{num_shared} shared + {own} of one's own",
        str(outputs),
        "the shared prefix was asked once before, the rest is new",
        warm_up=lambda seed: requests((*_as_tuple(seed), "warm-up")),
        least_input_tokens=num_shared + own.low,
    )


def interference(
    vocabulary: Vocabulary,
    api: Api,
    inputs: Lengths,
    outputs: Lengths,
    long_inputs: Lengths,
    *,
    long_output: int = 4,
    every_s: float = 5.0,
) -> tuple[Workload, Workload]:
    """Streams that decode, first in peace and then while long prompts arrive (W3)."""

    def streams(seed: object) -> Iterator[PlannedRequest]:
        maker = PromptMaker(vocabulary, seed)
        while True:
            prompt = _prompt(maker, api, inputs.draw(maker.random))
            yield PlannedRequest(prompt, outputs.draw(maker.random), group=STREAMS)

    def long_prompts(seed: object) -> Iterator[PlannedRequest]:
        maker = PromptMaker(vocabulary, (*_as_tuple(seed), "long"))
        while True:
            prompt = _prompt(maker, api, long_inputs.draw(maker.random))
            yield PlannedRequest(prompt, long_output, group=LONG_PROMPTS)

    state = "prompts are new to every cache"
    calm = Workload(
        "interference",
        STREAMS,
        streams,
        str(inputs),
        str(outputs),
        state,
        least_input_tokens=inputs.low,
    )
    disturbed = Workload(
        "interference",
        STREAMS,
        streams,
        f"{inputs}; long prompts {long_inputs}",
        f"{outputs}; long prompts {long_output}",
        state,
        intruders=Intruders(long_prompts, every_s),
        least_input_tokens=inputs.low,
    )
    return calm, disturbed


def read_trace(
    path: Path,
    vocabulary: Vocabulary,
    seed: object,
    *,
    speed: float = 1.0,
    length_scale: float = 1.0,
    max_tokens: int | None = None,
    block_size: int = 512,
) -> tuple[list[TimedRequest], int]:
    """Read a Mooncake trace; return its requests and how many were too long to replay.

    A line holds `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for each
    `block_size` tokens: equal ids stand for equal blocks, so the prompts share prefixes as the
    recorded ones did. `length_scale` shrinks prompts, blocks and answers alike, for models with a
    shorter window; requests above `max_tokens` even so are left out.

    Raises:
        TraceError: a line is broken.
    """
    if vocabulary.token_ids is None:
        raise TraceError("a trace needs the model's tokenizer: its lengths are tokens")
    scaled_block = max(1, round(block_size * length_scale))
    timed: list[TimedRequest] = []
    num_too_long = 0
    first_ms: float | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                recorded = _Recorded.parse(orjson.loads(line))
            except (orjson.JSONDecodeError, ValueError) as error:
                raise TraceError(f"{path}:{number}: {error}") from None
            first_ms = recorded.timestamp_ms if first_ms is None else first_ms
            num_inputs = max(1, round(recorded.input_length * length_scale))
            num_outputs = max(1, round(recorded.output_length * length_scale))
            if max_tokens is not None and num_inputs + num_outputs > max_tokens:
                num_too_long += 1
                continue
            prompt = _trace_prompt(vocabulary, seed, recorded, number, num_inputs, scaled_block)
            at_s = (recorded.timestamp_ms - first_ms) / 1e3 / speed
            timed.append(TimedRequest(at_s, PlannedRequest(prompt, num_outputs)))
    if not timed:
        raise TraceError(f"{path}: no request that could be replayed ({num_too_long} too long)")
    return sorted(timed, key=lambda request: request.at_s), num_too_long


def poisson(workload: Workload, seed: object, rate: float, duration_s: float) -> list[TimedRequest]:
    """Independent users: arrivals at `rate` a second, whether or not earlier ones are answered."""
    source = PromptMaker(Vocabulary(), (*_as_tuple(seed), "arrivals")).random
    requests = workload.requests(seed)
    timed: list[TimedRequest] = []
    at_s = source.expovariate(rate)
    while at_s < duration_s:
        timed.append(TimedRequest(at_s, next(requests)))
        at_s += source.expovariate(rate)
    return timed


@dataclass(frozen=True)
class _Recorded:
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: list[int]

    @classmethod
    def parse(cls, line: Any) -> "_Recorded":
        if not isinstance(line, dict):
            raise ValueError("expected an object")
        timestamp: Any = line.get("timestamp")
        if type(timestamp) not in (int, float) or timestamp < 0:
            raise ValueError(f"timestamp is {timestamp!r}, expected milliseconds")
        for name in ("input_length", "output_length"):
            if type(line.get(name)) is not int or line[name] < 1:
                raise ValueError(f"{name} is {line.get(name)!r}, expected a positive integer")
        hash_ids = line.get("hash_ids", [])
        if not isinstance(hash_ids, list) or any(type(each) is not int for each in hash_ids):
            raise ValueError("hash_ids is no list of integers")
        return cls(timestamp, line["input_length"], line["output_length"], hash_ids)


def _trace_prompt(
    vocabulary: Vocabulary,
    seed: object,
    recorded: _Recorded,
    number: int,
    num_tokens: int,
    block_size: int,
) -> list[int]:
    token_ids: list[int] = []
    # Where a trace names no blocks, nothing is shared.
    unnamed = (("line", number, index) for index in count())
    names = [*recorded.hash_ids]
    while len(token_ids) < num_tokens:
        name: object = names.pop(0) if names else next(unnamed)
        block = PromptMaker(vocabulary, (seed, "block", name)).prompt(block_size)
        assert isinstance(block, list)
        token_ids += block
    return token_ids[:num_tokens]


def _prompt(maker: PromptMaker, api: Api, num_tokens: int) -> str | list[int]:
    return maker.text(num_tokens) if api == "chat" else maker.prompt(num_tokens)


def _joined(prefix: str | list[int], tail: str | list[int]) -> str | list[int]:
    if isinstance(prefix, list) and isinstance(tail, list):
        return prefix + tail
    return f"{prefix} {tail}"


def _as_tuple(seed: object) -> tuple[object, ...]:
    return seed if isinstance(seed, tuple) else (seed,)


def _first(seed: object) -> object:
    """A run's seed without the round and the point that follow it."""
    return _as_tuple(seed)[0]
