"""The default model's tokens equal those of `transformers`, however they are computed.

Other ways to compute them are compared in every number format by test_bit_equality; here they
are tried with all prompts to their hundredth token, by `make bit-equality`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engine.config import BackendName, EngineConfig
from engine.engine import Engine
from engine.sampling import SamplingParams
from quality.prompts import VARIED_PROMPTS
from tests.engine_runs import Continuation, run, running_engine, token_ids

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS = 100
# On torch, which is slower.
NUM_FEW_TOKENS = 16
NUM_TORCH_PROMPTS = 8

Continuations = Mapping[str, Continuation]


@pytest.fixture(scope="module")
def config(smollm2_path: Path) -> EngineConfig:
    return EngineConfig(
        smollm2_path, dtype="float32", num_blocks=500, max_num_batched_tokens=512, num_threads=2
    )


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[Engine]:
    with running_engine(config) as made:
        yield made


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> dict[str, list[int]]:
    tokenizer = Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))
    return {f"p{i}": tokenizer.encode(text).ids for i, text in enumerate(VARIED_PROMPTS)}


@pytest.fixture(scope="module")
def batched(engine: Engine, prompts: Mapping[str, list[int]]) -> Continuations:
    """Sixteen at a time, on a cold cache."""
    return run(engine, prompts, greedy)


@pytest.fixture(scope="module")
def warm(engine: Engine, batched: Continuations, prompts: Mapping[str, list[int]]) -> Continuations:
    """The same again, on the cache that this left."""
    return run(engine, prompts, greedy)


def greedy(name: str, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(num_tokens, temperature=0.0)


def few_greedy(name: str) -> SamplingParams:
    return greedy(name, NUM_FEW_TOKENS)


def first_token_ids(continuations: Continuations) -> dict[str, tuple[int, ...]]:
    return {name: each.token_ids[:NUM_FEW_TOKENS] for name, each in continuations.items()}


def test_there_are_twenty_prompts_of_one_token_to_nearly_three_thousand(
    prompts: Mapping[str, list[int]],
) -> None:
    lengths = sorted(len(prompt) for prompt in prompts.values())

    assert len(lengths) == 20
    assert lengths[0] == 1
    assert lengths[-1] > 2700


def test_greedy_tokens_and_log_probabilities_equal_transformers(
    batched: Continuations, prompts: Mapping[str, list[int]], smollm2_path: Path
) -> None:
    """Given our tokens, each must be the oracle's choice after the ones before it.

    By induction that is what its own greedy loop would produce.
    """
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    for name, ours in batched.items():
        sequence = torch.tensor([prompts[name] + list(ours.token_ids[:-1])])
        with torch.inference_mode():
            logits = oracle(sequence, logits_to_keep=NUM_TOKENS).logits[0]
        expected = torch.log_softmax(logits, -1)

        assert expected.argmax(-1).tolist() == list(ours.token_ids), name
        chosen = expected.gather(1, torch.tensor(ours.token_ids)[:, None])[:, 0]
        assert (torch.tensor(ours.logprobs) - chosen).abs().max() < 1e-4, name


@pytest.mark.exhaustive
def test_alone_gives_the_same_tokens(
    batched: Continuations, prompts: Mapping[str, list[int]], config: EngineConfig
) -> None:
    with running_engine(replace(config, enable_prefix_caching=False)) as engine:
        alone = run(engine, prompts, greedy, at_once=1)

    assert token_ids(alone) == token_ids(batched)


@pytest.mark.exhaustive
def test_chunks_of_32_give_the_same_tokens(
    batched: Continuations, prompts: Mapping[str, list[int]], config: EngineConfig
) -> None:
    limits = {"max_num_batched_tokens": 48, "long_prefill_token_threshold": 32}
    with running_engine(replace(config, **limits)) as chunked:  # type: ignore[arg-type]
        assert token_ids(run(chunked, prompts, greedy)) == token_ids(batched)


@pytest.mark.exhaustive
def test_a_warm_prefix_cache_gives_the_same_tokens(
    warm: Continuations, batched: Continuations, prompts: Mapping[str, list[int]]
) -> None:
    assert token_ids(warm) == token_ids(batched)
    for name, prompt in prompts.items():
        assert warm[name].num_cached_tokens == (len(prompt) - 1) // 16 * 16


def test_the_torch_backend_gives_the_same_tokens(
    batched: Continuations, prompts: Mapping[str, list[int]], config: EngineConfig
) -> None:
    chosen = list(prompts)[:NUM_TORCH_PROMPTS]
    backend: BackendName = "torch"
    with running_engine(replace(config, backend=backend)) as on_torch:
        together = run(on_torch, {name: prompts[name] for name in chosen}, few_greedy)
        alone = run(on_torch, {name: prompts[name] for name in chosen[:2]}, few_greedy, at_once=1)

    expected = first_token_ids(batched)
    assert token_ids(together) == {name: expected[name] for name in chosen}
    assert token_ids(alone) == {name: expected[name] for name in chosen[:2]}
