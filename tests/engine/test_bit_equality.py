"""Each format gives a prompt one continuation, to the last bit, however it is computed.

`make test` tries some prompts in each format, several ways at once; `make bit-equality` all
twenty, each way by itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.config import EngineConfig, KvDtypeName
from engine.engine import Engine
from engine.kernels.library import load_library
from engine.sampling import SamplingParams
from quality.prompts import VARIED_PROMPTS
from tests.engine_runs import Continuation, hand_over, run, running_engine, token_ids

pytestmark = pytest.mark.skipif(load_library() is None, reason="the kernels could not be built")


@dataclass(frozen=True)
class Format:
    """Number formats of weights and KV."""

    weights: str
    kv_dtype: KvDtypeName

    def __str__(self) -> str:
        return f"{self.weights} with {self.kv_dtype} KV"

    def config(self, folder: Path) -> EngineConfig:
        is_float = self.weights in ("float32", "bfloat16")
        return EngineConfig(
            folder,
            backend="native",
            dtype=self.weights if is_float else "auto",  # type: ignore[arg-type]
            quantization="none" if is_float else self.weights,  # type: ignore[arg-type]
            kv_cache_dtype=self.kv_dtype,
            num_blocks=400,
            num_threads=1,
        )


@dataclass(frozen=True)
class Extent:
    """How much is tried."""

    prompts: tuple[int, ...]
    max_prompt_tokens: int
    num_tokens: int


# One token, Chinese, English; the last has two segments of attention and some of a third.
SOME = Extent((0, 9, 13, 18), max_prompt_tokens=290, num_tokens=8)
ALL = Extent(tuple(range(20)), max_prompt_tokens=4000, num_tokens=32)

FORMATS = [
    Format("int4", "bfloat16"),
    Format("int4_channel", "bfloat16"),
    Format("int8", "bfloat16"),
    Format("bfloat16", "bfloat16"),
    Format("float32", "float32"),
    Format("int4_channel", "int8"),
    Format("int4", "int8"),
    Format("int4", "fp8"),
    Format("int8", "fp8"),
    Format("int4", "float32"),
]


@dataclass(frozen=True)
class Case:
    """A format and what it gives in the plain way: sixteen at a time, in chunks of 256, on two
    threads. (Other ways have one: where other work has the cores, two wait for each other.)
    """

    # With one thread.
    config: EngineConfig
    prompts: Mapping[str, list[int]]
    num_tokens: int
    expected: Mapping[str, Continuation]
    # Its prefix cache has seen all prompts.
    engine: Engine

    def params(self, name: str) -> SamplingParams:
        """Every second prompt is continued at random."""
        number = int(name)
        if number % 2:
            return SamplingParams(self.num_tokens, temperature=0.8, top_p=0.95, seed=number)
        return SamplingParams(self.num_tokens, temperature=0.0)

    def short_prompts(self) -> dict[str, list[int]]:
        return {name: prompt for name, prompt in self.prompts.items() if len(prompt) < 200}


@pytest.fixture(scope="module", params=FORMATS, ids=str)
def case(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[Case]:
    yield from make_case(request.param, SOME, smollm2_path)


@pytest.fixture(scope="module", params=FORMATS, ids=str)
def full_case(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[Case]:
    yield from make_case(request.param, ALL, smollm2_path)


def make_case(chosen: Format, extent: Extent, smollm2_path: Path) -> Iterator[Case]:
    tokenizer = Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))
    prompts = {
        str(index): tokenizer.encode(VARIED_PROMPTS[index]).ids[: extent.max_prompt_tokens]
        for index in extent.prompts
    }
    config = chosen.config(smollm2_path)
    with running_engine(replace(config, num_threads=2)) as engine:
        case = Case(config, prompts, extent.num_tokens, {}, engine)
        yield replace(case, expected=run(engine, prompts, case.params))


def assert_same(actual: Mapping[str, Continuation], case: Case) -> None:
    for name in actual:
        assert actual[name] == case.expected[name], name


def check_from_the_prefix_cache(case: Case) -> None:
    warm = run(case.engine, case.prompts, case.params)

    assert_same(warm, case)
    for name, prompt in case.prompts.items():
        assert warm[name].num_cached_tokens == (len(prompt) - 1) // 16 * 16


def check_preempted_and_resumed(case: Case, **settings: int) -> None:
    prompts = case.short_prompts()
    longest = max(len(prompt) for prompt in prompts.values()) + case.num_tokens
    # Small blocks, so that sequences outgrow them often. No layer by layer, or a slow moment makes
    # the prompts come one after another and nothing is preempted.
    config = replace(
        case.config,
        block_size=4,
        num_blocks=longest // 4 + 4,
        step_objective_ms=0,
        **settings,  # type: ignore[arg-type]
    )

    with running_engine(config) as engine:
        assert_same(run(engine, prompts, case.params), case)
        assert engine.load().num_preemptions > 0


def check_handed_over(case: Case, **settings: int) -> None:
    """Disaggregated: the prompt in one engine, the rest in another that got its blocks."""
    config = replace(case.config, max_num_seqs=len(case.prompts))
    with (
        running_engine(replace(config, **settings)) as prefill,  # type: ignore[arg-type]
        running_engine(config) as decode,
    ):
        assert_same(hand_over(prefill, decode, case.prompts, case.params), case)


def check_guessed_ahead(case: Case, num_tokens: int) -> None:
    """Prompts whose end came before: once with one continuation, once with one after another."""
    longest = max(case.prompts.values(), key=len)
    steady = {name: 3 * prompt[:20] for name, prompt in case.prompts.items()}
    varying = {
        str(number): [token for other in longest[:20] for token in (number, number + 1, other)]
        + [number, number + 1]
        for number in (1000, 1001)
    }
    prompts = steady | varying

    def params(name: str) -> SamplingParams:
        return replace(case.params(name), max_tokens=num_tokens)

    plain = run(case.engine, prompts, params)
    before = case.engine.load()
    guessed = run(case.engine, prompts, params, num_logprobs=None)
    after = case.engine.load()

    assert token_ids(guessed) == token_ids(plain)
    num_accepted = after.drafts.num_accepted_tokens - before.drafts.num_accepted_tokens
    num_guessed = after.drafts.num_draft_tokens - before.drafts.num_draft_tokens
    assert 0 < num_accepted < num_guessed


def check(case: Case, at_once: int = 16, **settings: float) -> None:
    """Computed from nothing, under other settings."""
    config = replace(case.config, enable_prefix_caching=False, **settings)  # type: ignore[arg-type]
    with running_engine(config) as engine:
        assert_same(run(engine, case.prompts, case.params, at_once), case)


def test_from_the_prefix_cache(case: Case) -> None:
    check_from_the_prefix_cache(case)


def test_alone_in_chunks_of_64_on_one_thread(case: Case) -> None:
    check(case, at_once=1, max_num_batched_tokens=64)


def test_handed_over_after_chunks_of_16(case: Case) -> None:
    check_handed_over(case, max_num_batched_tokens=16)


def test_a_layer_at_a_time_beside_decodes(case: Case) -> None:
    check(case, max_num_batched_tokens=100, step_objective_ms=1e-3)


def test_preempted_and_resumed(case: Case) -> None:
    check_preempted_and_resumed(case)


def test_guessed_ahead(case: Case) -> None:
    check_guessed_ahead(case, num_tokens=24)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
class TestAllPrompts:
    """Twenty prompts, up to about 3,000 tokens, in every way."""

    @pytest.mark.parametrize("num_threads", [1, 2])
    def test_alone(self, full_case: Case, num_threads: int) -> None:
        check(full_case, at_once=1, num_threads=num_threads)

    @pytest.mark.parametrize(("chunk", "num_threads"), [(16, 1), (64, 2), (256, 1)])
    def test_sixteen_at_once_in_chunks(self, full_case: Case, chunk: int, num_threads: int) -> None:
        check(full_case, max_num_batched_tokens=chunk, max_num_seqs=16, num_threads=num_threads)

    def test_from_the_prefix_cache(self, full_case: Case) -> None:
        check_from_the_prefix_cache(full_case)

    def test_handed_over(self, full_case: Case) -> None:
        check_handed_over(full_case)

    def test_preempted_and_resumed(self, full_case: Case) -> None:
        check_preempted_and_resumed(full_case)

    def test_guessed_ahead(self, full_case: Case) -> None:
        check_guessed_ahead(full_case, num_tokens=100)
