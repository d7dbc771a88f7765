"""What a prefix that the mesh has seen is worth: to many agents at once, and after a restart.

    python -m benchmarks.warm_cache agents
    python -m benchmarks.warm_cache restart

`agents`: prompts of 1,500 shared tokens and 100 of their own, 8 at a time, on two prefill workers
and a decode worker, beside prompts of 1,600 tokens that nobody has asked before, 8 at a time.
`restart`: the first request after `pdmesh down` and `up` with a prefix of 1,500 tokens that is on
disk, beside the same with a warm and with a cold mesh.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai

from mesh.ports import find_free_ports

MODEL = "smollm2-135m-instruct"
NUM_SHARED, NUM_OWN, AT_A_TIME = 1500, 100, 8
OUTPUT_TOKENS = 16


@dataclass(frozen=True)
class Asked:
    """What one request took."""

    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int


class Mesh:
    """`pdmesh` in a home of its own, with the models of another."""

    def __init__(self, home: Path, models: Path) -> None:
        self._home = home
        (home / "models").symlink_to(models)
        [self._port] = find_free_ports(1)

    def pdmesh(self, *arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "mesh.cli.main", *arguments],
            env={**os.environ, "PDMESH_HOME": str(self._home)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    @contextmanager
    def up(self, *arguments: str) -> Iterator[openai.AsyncOpenAI]:
        self.pdmesh("up", "--detach", "--port", str(self._port), *arguments)
        try:
            yield openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{self._port}/v1", api_key="none", max_retries=0
            )
        finally:
            self.pdmesh("down")

    def num_disk_blocks(self) -> int:
        return sum(1 for _ in (self._home / "kv").rglob("*") if _.is_file())


def draw(num_tokens: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1000, 40_000) for _ in range(num_tokens)]


async def ask(client: openai.AsyncOpenAI, prompt: Sequence[int]) -> Asked:
    started, first = time.perf_counter(), None
    stream = await client.completions.create(
        model=MODEL,
        prompt=list(prompt),
        max_tokens=OUTPUT_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if first is None and chunk.choices:
            first = time.perf_counter()
        usage = chunk.usage
    assert first is not None
    assert usage is not None
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens if details is not None else 0) or 0
    return Asked(1000 * (first - started), usage.prompt_tokens, cached)


async def ask_together(client: openai.AsyncOpenAI, prompts: Sequence[Sequence[int]]) -> list[Asked]:
    return list(await asyncio.gather(*(ask(client, prompt) for prompt in prompts)))


async def agents(mesh: Mesh) -> None:
    seeds = iter(range(1, 1_000_000))
    shared = draw(NUM_SHARED, 0)
    with mesh.up("--prefill", "2") as client:
        await ask(client, draw(64, next(seeds)))  # the first request of processes is slower
        cold, warm = [], []
        await ask_together(client, [shared + draw(NUM_OWN, next(seeds)) for _ in range(4)])
        for _ in range(3):
            fresh = [draw(NUM_SHARED + NUM_OWN, next(seeds)) for _ in range(AT_A_TIME)]
            cold += await ask_together(client, fresh)
            for _ in range(2):
                known = [shared + draw(NUM_OWN, next(seeds)) for _ in range(AT_A_TIME)]
                warm += await ask_together(client, known)
    cached = sum(one.cached_tokens for one in warm) / sum(one.prompt_tokens for one in warm)
    print(f"{len(warm)} requests of {NUM_SHARED} + {NUM_OWN} tokens, {AT_A_TIME} at a time")
    print(f"prompt tokens from cache: {cached:.1%} (at most {NUM_SHARED // 16 * 16 / 1600:.1%})")
    report("cold", cold, "warm", warm)


async def restart(mesh: Mesh) -> None:
    seeds = iter(range(1, 1_000_000))
    shared = draw(NUM_SHARED, 0)
    cold: list[Asked] = []
    warm: list[Asked] = []
    with mesh.up() as client:
        await ask(client, draw(64, next(seeds)))
        cold = [await ask(client, draw(NUM_SHARED + 16, next(seeds))) for _ in range(3)]
        await ask(client, shared + draw(16, next(seeds)))
        warm = [await ask(client, shared + draw(16, next(seeds))) for _ in range(3)]
    after: list[Asked] = []
    for _ in range(3):
        with mesh.up() as client:
            after.append(await ask(client, shared + draw(16, next(seeds))))
    print(f"files of KV on disk: {mesh.num_disk_blocks()}")
    report("cold", cold, "first after restart", after)
    report("warm", warm, "first after restart", after)


def report(name: str, before: Sequence[Asked], other_name: str, after: Sequence[Asked]) -> None:
    medians = [statistics.median(one.ttft_ms for one in group) for group in (before, after)]
    for label, group, median in zip((name, other_name), (before, after), medians, strict=True):
        cached = statistics.median(one.cached_tokens for one in group)
        worst = max(one.ttft_ms for one in group)
        print(f"{label}: TTFT {median:.0f} ms, at most {worst:.0f}; {cached:.0f} tokens cached")
    print(f"{other_name}: {medians[1] / medians[0]:.2f} of {name}, {json.dumps(medians)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("experiment", choices=("agents", "restart"))
    parser.add_argument("--models", type=Path, default=Path("~/.pdmesh/models"))
    arguments = parser.parse_args()
    # Whoever ends this ends the mesh with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        mesh = Mesh(Path(folder), arguments.models.expanduser())
        asyncio.run({"agents": agents, "restart": restart}[arguments.experiment](mesh))


if __name__ == "__main__":
    main()
