"""Log-probabilities of the prompt: complete and the same, however the prompt is computed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling import SamplingParams, TokenLogprobs, logprobs_of
from tests.fakes import ContentHasher, logits_after, make_engine, run_to_end, token_ids_of
from tests.tiny_llama import make_tiny_model, reference_logits

PARAMS = SamplingParams(
    max_tokens=4,
    temperature=0.0,
    num_prompt_logprobs=2,
    # None of this is what the model itself says.
    logit_bias={5: 50.0},
    repetition_penalty=1.5,
)
PROMPT = [(7 * index) % 37 + 3 for index in range(30)]


def expected(prompt: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """What MemoryRunner's model says of each token but the first."""
    scores = [
        logprobs_of(prompt[end], logits_after(prompt[:end], 40), 2) for end in range(1, len(prompt))
    ]
    return tuple(one for one in scores if one is not None)


@pytest.mark.parametrize("budget", [8, 11, 64])
def test_every_token_but_the_first_has_a_score_in_chunks_of_any_size(budget: int) -> None:
    engine = make_engine(max_num_batched_tokens=budget)

    [first, *others] = run_to_end(engine, Request("r", PROMPT, PARAMS))["r"]

    assert first.prompt_logprobs == expected(PROMPT)
    assert all(one.prompt_logprobs == () for one in others)


def test_cached_blocks_are_computed_again_and_the_others_use_them() -> None:
    engine = make_engine()
    silent = replace(PARAMS, num_prompt_logprobs=None)
    [cold, *_] = run_to_end(engine, Request("cold", PROMPT, silent))["cold"]

    [scored, *_] = run_to_end(engine, Request("scored", PROMPT, PARAMS))["scored"]
    [warm, *_] = run_to_end(engine, Request("warm", PROMPT, silent))["warm"]

    assert (scored.num_cached_tokens, scored.prompt_logprobs) == (0, expected(PROMPT))
    assert warm.num_cached_tokens > 0
    assert cold.token_id == scored.token_id == warm.token_id


def test_neighbours_in_the_batch_keep_their_own_rows() -> None:
    engine = make_engine(max_num_batched_tokens=24)
    alone = run_to_end(make_engine(), Request("b", PROMPT[3:20], replace(PARAMS, seed=1)))["b"]
    silent = Request("a", PROMPT[5:9], replace(PARAMS, num_prompt_logprobs=None))

    outputs = run_to_end(
        engine, silent, Request("b", PROMPT[3:20], PARAMS), Request("c", PROMPT[:9], PARAMS)
    )

    assert outputs["b"][0].prompt_logprobs == expected(PROMPT[3:20])
    assert outputs["c"][0].prompt_logprobs == expected(PROMPT[:9])
    assert all(one.prompt_logprobs == () for one in outputs["a"])
    assert token_ids_of(outputs["b"]) == token_ids_of(alone)


def test_a_preempted_prompt_is_scored_once() -> None:
    # Room for one and a half: the younger gives its blocks away in the middle of its prompt.
    engine = make_engine(num_blocks=12, max_num_batched_tokens=8)
    elder = Request("elder", PROMPT[:16], replace(PARAMS, max_tokens=24, ignore_eos=True))

    outputs = run_to_end(engine, elder, Request("younger", PROMPT, PARAMS))

    assert outputs["younger"][0].prompt_logprobs == expected(PROMPT)


def test_whoever_resumes_does_not_score_again() -> None:
    resumed = Request("r", PROMPT, PARAMS, output_token_ids=[9])

    [first, *_] = run_to_end(make_engine(), resumed)["r"]

    assert first.prompt_logprobs == ()


def test_a_request_over_with_its_first_token_has_its_scores() -> None:
    outputs = run_to_end(make_engine(), Request("r", PROMPT, replace(PARAMS, max_tokens=1)))

    assert outputs["r"][0].is_last
    assert outputs["r"][0].prompt_logprobs == expected(PROMPT)


def test_a_prompt_of_one_token_has_none() -> None:
    [first, *_] = run_to_end(make_engine(), Request("r", PROMPT[:1], PARAMS))["r"]

    assert first.prompt_logprobs == ()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    config = EngineConfig(Path(folder), block_size=4, num_blocks=200, max_num_batched_tokens=32)
    return build_engine(config, lambda fields: ContentHasher())


def test_scores_are_those_of_the_reference(engine: Engine, tmp_path: Path) -> None:
    prompt = [(11 * index) % 90 + 3 for index in range(100)]
    reference = reference_logits(make_tiny_model(tmp_path), prompt).log_softmax(-1)

    [first, *_] = run_to_end(engine, Request("r", prompt, PARAMS))["r"]

    assert [one.token_id for one in first.prompt_logprobs] == prompt[1:]
    assert [one.logprob for one in first.prompt_logprobs] == pytest.approx(
        [float(reference[row, token_id]) for row, token_id in enumerate(prompt[1:])], abs=1e-3
    )
    assert [one.top[0].token_id for one in first.prompt_logprobs] == reference.argmax(-1)[
        :-1
    ].tolist()
