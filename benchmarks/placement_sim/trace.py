"""Requests in Mooncake's JSONL format: generated with a seed, written, and read."""

import json
import random
from bisect import bisect
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate, count
from pathlib import Path

# Tokens of one hash id, as in Mooncake's published traces.
BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. A hash id stands for a block and all that is before it."""

    # Milliseconds from the start.
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class TraceShape:
    """What a generated trace looks like; the means are near those of Mooncake's conversations."""

    num_requests: int = 10_000
    requests_per_s: float = 20.0
    num_shared_prefixes: int = 200
    # Zipf's exponent: how much more popular the first prefixes are.
    popularity: float = 1.1
    mean_turns: float = 3.0
    think_s: float = 40.0
    seed: int = 1


def generate(shape: TraceShape) -> list[TraceRequest]:
    """Conversations that begin with a shared prefix and grow with every turn."""
    chance, ids = random.Random(shape.seed), count()
    prefixes = [
        [next(ids) for _ in range(chance.randint(2, 12))] for _ in range(shape.num_shared_prefixes)
    ]
    weights = list(
        accumulate((rank + 1) ** -shape.popularity for rank in range(shape.num_shared_prefixes))
    )
    requests: list[TraceRequest] = []
    # Conversations that began before make the load even from the start.
    starts_at = -5 * shape.think_s * shape.mean_turns
    ends_at = 1.2 * shape.num_requests / shape.requests_per_s
    while starts_at < ends_at:
        starts_at += chance.expovariate(shape.requests_per_s / shape.mean_turns)
        prefix = prefixes[bisect(weights, chance.random() * weights[-1])]
        requests += _conversation(chance, ids, list(prefix), starts_at, shape)
    requests = [request for request in requests if request.timestamp >= 0]
    requests.sort(key=lambda request: request.timestamp)
    return requests[: shape.num_requests]


def _conversation(
    chance: random.Random,
    ids: "count[int]",
    hash_ids: list[int],
    starts_at: float,
    shape: TraceShape,
) -> Iterator[TraceRequest]:
    at, num_tokens = starts_at, len(hash_ids) * BLOCK_TOKENS
    while True:
        num_tokens += min(30_000, int(chance.lognormvariate(6.8, 1.2)) + 1)
        output_length = min(2000, int(chance.lognormvariate(4.8, 0.9)) + 1)
        hash_ids += [next(ids) for _ in range(-(-num_tokens // BLOCK_TOKENS) - len(hash_ids))]
        yield TraceRequest(int(at * 1000), num_tokens, output_length, list(hash_ids))
        if chance.random() < 1 / shape.mean_turns:
            return
        # The block that was partly filled has another content from now on.
        del hash_ids[num_tokens // BLOCK_TOKENS :]
        num_tokens += output_length
        at += chance.expovariate(1 / shape.think_s)


def write(requests: list[TraceRequest], path: Path) -> None:
    path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in requests))


def read(path: Path) -> list[TraceRequest]:
    """A trace of one's own, or one that Mooncake published."""
    return [TraceRequest(**json.loads(line)) for line in path.read_text().splitlines()]


def faster(requests: list[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests, closer together."""
    return [
        TraceRequest(int(one.timestamp / factor), one.input_length, one.output_length, one.hash_ids)
        for one in requests
    ]
