"""Requests for an engine whose model is a MemoryRunner, and what is left of them."""

from dataclasses import replace

from engine.engine import Engine
from engine.sampling import SamplingParams
from tests.fakes import EOS, MemoryRunner

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SEEDED = SamplingParams(max_tokens=12, temperature=0.9, seed=5)
VARIANTS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalties": replace(
        SEEDED, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3
    ),
    "min tokens": replace(GREEDY, min_tokens=10, logit_bias={EOS: 100.0}),
    "bad words": replace(GREEDY, bad_words=((7,), (5, 6))),
    "truncated": replace(SEEDED, top_k=9, top_p=0.8, min_p=0.05),
    "logprobs": replace(SEEDED, num_logprobs=3),
}


def prompt_of(num_tokens: int, first: int = 3) -> list[int]:
    return [(first * 7 + 11 * index) % 37 + 3 for index in range(num_tokens)]


def runner_of(engine: Engine) -> MemoryRunner:
    runner = engine._runner
    assert isinstance(runner, MemoryRunner)
    return runner


def assert_idle(engine: Engine) -> None:
    """All blocks are back and nobody is known any more."""
    load = engine.load()
    assert load.num_free_blocks == load.num_blocks
    assert (load.num_leases, load.num_running, load.num_waiting) == (0, 0, 0)
    assert not engine._table.requests
    assert not engine._table.quarantined
    assert engine._pool._num_owners == [0] * load.num_blocks
