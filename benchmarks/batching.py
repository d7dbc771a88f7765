"""What batching gains, in one process: `python -m benchmarks.batching --help`.

Continuous against static batches, prompts that the prefix cache holds, and what the fifteenth
neighbour costs. Medians of rounds, which are interleaved, after a warm-up.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.settings import BenchmarkSettings
from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, RequestFailed, TokenOutput
from engine.sampling import SamplingParams
from mesh.bench.machine import describe_machine
from mesh.block_keys import BlockKeys, layout_fingerprint

NUM_SEQS = 16
VOCAB = range(1000, 40000)


@dataclass(frozen=True)
class Job:
    """A request of random tokens."""

    prompt: list[int]
    num_tokens: int


class Bench:
    """An engine, and prompts that it has not seen."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_requests = 0
        self._rng = np.random.default_rng(0)

    def prompt(self, num_tokens: int) -> list[int]:
        return [int(i) for i in self._rng.integers(VOCAB.start, VOCAB.stop, num_tokens)]

    def add(self, job: Job) -> str:
        self._num_requests += 1
        request_id = str(self._num_requests)
        params = SamplingParams(job.num_tokens, temperature=0.0, ignore_eos=True)
        self._engine.add_request(Request(request_id, job.prompt, params))
        return request_id

    def run(self, jobs: Sequence[Job]) -> dict[str, list[float]]:
        """Run all at once; when each token came, in seconds from the start."""
        started = time.perf_counter()
        times: dict[str, list[float]] = {self.add(job): [] for job in jobs}
        num_running = len(jobs)
        while num_running:
            for event in self._engine.step():
                assert not isinstance(event, RequestFailed), event.error
                if isinstance(event, TokenOutput):
                    times[event.request_id].append(time.perf_counter() - started)
                    num_running -= event.is_last
        return times


def mixed_jobs(bench: Bench, num_jobs: int) -> list[Job]:
    """Prompts of 16 to 256 tokens, answers of 4 to 256: most are short, some are long."""
    rng = np.random.default_rng(1)
    lengths = np.exp(rng.uniform(np.log(4), np.log(256), num_jobs)).astype(int)
    prompts = np.exp(rng.uniform(np.log(16), np.log(256), num_jobs)).astype(int)
    return [Job(bench.prompt(int(p)), int(n)) for p, n in zip(prompts, lengths, strict=True)]


def batches(bench: Bench) -> dict[str, float]:
    """Useful tokens a second of 64 requests of mixed lengths, sixteen at a time."""
    jobs = mixed_jobs(bench, 64)
    num_tokens = sum(job.num_tokens for job in jobs)
    groups = [jobs[i : i + NUM_SEQS] for i in range(0, len(jobs), NUM_SEQS)]
    padded = [[_as_long_as(job, group) for job in group] for group in groups]
    ways: dict[str, Callable[[], object]] = {
        # The engine takes sixteen; the others wait for room.
        "continuous": lambda: bench.run(_fresh(bench, jobs)),
        # As static batches are: a batch's rows are computed until its longest answer ends.
        "static": lambda: [bench.run(_fresh(bench, group)) for group in padded],
        # A static batch that computes no row in vain, but takes nobody in before its end.
        "static, rows that end are dropped": lambda: [
            bench.run(_fresh(bench, group)) for group in groups
        ],
    }
    return {name: num_tokens / _seconds(way) for name, way in ways.items()}


def prefix_hit(bench: Bench) -> dict[str, float]:
    """Time to the first token of a prompt of 1,600 tokens, of which 1,500 may be cached."""
    shared = bench.prompt(1500)
    cold = bench.run([Job(bench.prompt(1600), 2)])
    bench.run([Job(shared, 2)])
    hit = bench.run([Job(shared + bench.prompt(100), 2)])
    cold_s, hit_s = (next(iter(times.values()))[0] for times in (cold, hit))
    return {"cold TTFT ms": cold_s * 1e3, "hit TTFT ms": hit_s * 1e3}


def neighbours(bench: Bench) -> dict[str, float]:
    """Time per output token, alone and among sixteen; prompts of 64, answers of 128."""
    result = {}
    for num_seqs in (1, NUM_SEQS):
        times = bench.run([Job(bench.prompt(64), 128) for _ in range(num_seqs)])
        tpot = [(each[-1] - each[0]) / (len(each) - 1) for each in times.values()]
        result[f"TPOT ms, {num_seqs} at once"] = statistics.median(tpot) * 1e3
    return result


def _as_long_as(job: Job, group: Sequence[Job]) -> Job:
    return Job(job.prompt, max(each.num_tokens for each in group))


def _fresh(bench: Bench, jobs: Sequence[Job]) -> list[Job]:
    """The same lengths, but prompts that no cache has."""
    return [Job(bench.prompt(len(job.prompt)), job.num_tokens) for job in jobs]


def _seconds(way: Callable[[], object]) -> float:
    started = time.perf_counter()
    way()
    return time.perf_counter() - started


@contextmanager
def _bench(model: Path, num_threads: int) -> Iterator[Bench]:
    config = EngineConfig(
        model, num_threads=num_threads, max_num_seqs=NUM_SEQS, max_num_waiting=1000
    )
    engine = build_engine(config, lambda fields: BlockKeys(layout_fingerprint(fields)))
    try:
        yield Bench(engine)
    finally:
        engine.close()


PARTS = {"batches": batches, "prefix": prefix_hit, "neighbours": neighbours}
# What the floors are for: what by what.
RATIOS = {
    "continuous / static (floor 2)": ("continuous", "static"),
    "cold / hit (floor 3)": ("cold TTFT ms", "hit TTFT ms"),
    "TPOT, 16 / 1 (below 2.5)": (f"TPOT ms, {NUM_SEQS} at once", "TPOT ms, 1 at once"),
}


def measure(bench: Bench, parts: Sequence[str], num_rounds: int) -> Iterator[dict[str, float]]:
    """Yield each round's numbers and ratios."""
    neighbours(bench)
    for _ in range(num_rounds):
        result: dict[str, float] = {}
        for part in parts:
            result |= PARTS[part](bench)
        for name, (over, under) in RATIOS.items():
            if over in result:
                result[name] = result[over] / result[under]
        yield result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, help="write JSON there")
    arguments = parser.parse_args()
    rounds = []
    with _bench(BenchmarkSettings().model_folder, arguments.threads) as bench:
        for result in measure(bench, arguments.parts, arguments.rounds):
            rounds.append(result)
            print(json.dumps({key: round(value, 2) for key, value in result.items()}), flush=True)
    for key in rounds[0]:
        values = sorted(each[key] for each in rounds)
        middle = statistics.median(values)
        print(f"{key:36} {middle:10.2f}   ({values[0]:.2f} to {values[-1]:.2f})")
    if arguments.output is not None:
        report = {"machine": describe_machine(), "threads": arguments.threads, "rounds": rounds}
        arguments.output.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
