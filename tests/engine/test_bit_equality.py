"""Each format gives a prompt one continuation, to the last bit, however it is computed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.config import EngineConfig, KvDtypeName
from engine.kernels.library import load_library
from engine.sampling import SamplingParams
from quality.prompts import VARIED_PROMPTS
from tests.engine_runs import Continuation, run, running_engine

pytestmark = pytest.mark.skipif(load_library() is None, reason="the kernels could not be built")

NUM_TOKENS = 16


@dataclass(frozen=True)
class Format:
    """Number formats of weights and KV, and the prompts that they are tried with."""

    weights: str
    kv_dtype: KvDtypeName
    # Of the twenty; the formats that nobody gets by default are tried with fewer.
    prompts: tuple[int, ...]
    # Some segments of attention; more take long.
    max_prompt_tokens: int = 300

    def __str__(self) -> str:
        return f"{self.weights} with {self.kv_dtype} KV"


_SOME = (0, 3, 9, 11, 13, 18)
FORMATS = [
    Format("int4", "bfloat16", tuple(range(20)), 1200),
    Format("int8", "bfloat16", (*range(0, 16, 2), 18), 600),
    Format("bfloat16", "bfloat16", _SOME),
    Format("float32", "float32", _SOME),
    Format("int4", "int8", _SOME),
    Format("int8", "fp8", _SOME),
    Format("int4", "float32", _SOME),
]


@dataclass(frozen=True)
class Case:
    """A format and what it gives in the plain way: sixteen at a time, in chunks of 256."""

    config: EngineConfig
    prompts: Mapping[str, list[int]]
    expected: Mapping[str, Continuation]
    # What the prefix cache gives when it has seen all prompts.
    warm: Mapping[str, Continuation]


@pytest.fixture(scope="module", params=FORMATS, ids=str)
def case(request: pytest.FixtureRequest, smollm2_path: Path) -> Case:
    chosen: Format = request.param
    tokenizer = Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))
    prompts = {
        str(index): tokenizer.encode(VARIED_PROMPTS[index]).ids[: chosen.max_prompt_tokens]
        for index in chosen.prompts
    }
    is_float = chosen.weights in ("float32", "bfloat16")
    config = EngineConfig(
        smollm2_path,
        backend="native",
        dtype=chosen.weights if is_float else "auto",  # type: ignore[arg-type]
        quantization="none" if is_float else chosen.weights,  # type: ignore[arg-type]
        kv_cache_dtype=chosen.kv_dtype,
        num_blocks=400,
        num_threads=2,
    )
    with running_engine(config) as engine:
        expected = run(engine, prompts, params)
        warm = run(engine, prompts, params)
    return Case(config, prompts, expected, warm)


def params(name: str) -> SamplingParams:
    """Every second prompt is continued at random."""
    number = int(name)
    if number % 2:
        return SamplingParams(NUM_TOKENS, temperature=0.8, top_p=0.95, seed=number)
    return SamplingParams(NUM_TOKENS, temperature=0.0)


def assert_same(actual: Mapping[str, Continuation], case: Case) -> None:
    for name in actual:
        assert actual[name] == case.expected[name], name


def test_alone_on_one_thread(case: Case) -> None:
    config = replace(case.config, num_threads=1, enable_prefix_caching=False)

    with running_engine(config) as engine:
        assert_same(run(engine, case.prompts, params, at_once=1), case)


@pytest.mark.parametrize("chunk", [16, 64])
def test_in_chunks(case: Case, chunk: int) -> None:
    config = replace(case.config, max_num_batched_tokens=chunk, max_num_seqs=16)

    with running_engine(config) as engine:
        assert_same(run(engine, case.prompts, params), case)


def test_from_the_prefix_cache(case: Case) -> None:
    assert_same(case.warm, case)
    for name, prompt in case.prompts.items():
        assert case.warm[name].num_cached_tokens == (len(prompt) - 1) // 16 * 16


def test_preempted_and_resumed(case: Case) -> None:
    prompts = {name: prompt for name, prompt in case.prompts.items() if len(prompt) < 200}
    longest = max(len(prompt) for prompt in prompts.values()) + NUM_TOKENS
    # Small blocks, so that sequences outgrow them often.
    config = replace(case.config, block_size=4, num_blocks=longest // 4 + 8)

    with running_engine(config) as engine:
        assert_same(run(engine, prompts, params), case)
        assert engine.load().num_preemptions > 0
