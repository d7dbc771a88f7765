"""Whether an engine's memory stays flat: `python -m benchmarks.soak --requests 10000`.

Requests of many lengths, some of them with a prefix that others have, some given up half-way.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil

from benchmarks.settings import BenchmarkSettings
from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, RequestFailed, TokenOutput
from engine.sampling import SamplingParams
from mesh.block_keys import BlockKeys, layout_fingerprint

MIB = 1 << 20
NUM_SAMPLES = 20
NUM_AT_ONCE = 24
NUM_BLOCKS = 400


def soak(engine: Engine, num_requests: int, vocab_size: int) -> Iterator[int]:
    """Serve requests; yield the process's resident bytes, `NUM_SAMPLES` times."""
    process = psutil.Process()
    requests = _requests(num_requests, vocab_size)
    running: dict[str, int] = {}
    num_done = 0
    while num_done < num_requests:
        while len(running) < NUM_AT_ONCE and (request := next(requests, None)) is not None:
            engine.add_request(request)
            running[request.request_id] = request.sampling_params.max_tokens
        num_before = num_done
        for event in engine.step():
            assert not isinstance(event, RequestFailed), event.error
            if isinstance(event, TokenOutput) and event.request_id in running:
                gives_up = int(event.request_id) % 7 == 0 and not event.is_last
                if gives_up:
                    engine.abort(event.request_id)
                if gives_up or event.is_last:
                    del running[event.request_id]
                    num_done += 1
        every = max(1, num_requests // NUM_SAMPLES)
        if num_before // every != num_done // every:
            yield process.memory_info().rss


def growth(samples: list[int]) -> int:
    """Bytes from the second quarter, when all buffers are made, to the last."""
    quarter = len(samples) // 4
    return int(np.median(samples[-quarter:]) - np.median(samples[quarter : 2 * quarter]))


def _requests(num_requests: int, vocab_size: int) -> Iterator[Request]:
    rng = np.random.default_rng(0)
    shared = rng.integers(3, vocab_size, 64).tolist()
    for index in range(num_requests):
        own = rng.integers(3, vocab_size, int(rng.integers(1, 48))).tolist()
        prompt = shared[: 16 * int(rng.integers(0, 5))] + own
        params = SamplingParams(
            int(rng.integers(1, 12)), temperature=float(index % 2), seed=index, ignore_eos=True
        )
        yield Request(str(index), prompt, params)


def main(report: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=BenchmarkSettings().model_folder)
    parser.add_argument("--max-growth-mib", type=float, default=8)
    arguments = parser.parse_args()
    # Few enough to be full soon: each block that is new to the prefix cache is some bytes of index.
    config = EngineConfig(arguments.model, num_blocks=NUM_BLOCKS, num_threads=arguments.threads)
    engine = build_engine(config, lambda fields: BlockKeys(layout_fingerprint(fields)))
    samples = []
    for resident in soak(engine, arguments.requests, engine.runner.vocab_size):
        samples.append(resident)
        report(f"{resident / MIB:.1f} MiB")
    engine.close()
    grown = growth(samples) / MIB
    report(f"{arguments.requests} requests: {grown:+.2f} MiB from the second to the last quarter")
    return int(grown > arguments.max_growth_mib)


if __name__ == "__main__":
    sys.exit(main())
