"""The default model's tokens equal those of `transformers`, however they are computed."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.engine import Engine, build_engine
from engine.request import Request, TokenOutput
from engine.sampling import SamplingParams
from mesh.block_keys import BlockKeys, layout_fingerprint
from quality.prompts import VARIED_PROMPTS

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS = 100
Outputs = Mapping[str, Sequence[TokenOutput]]


def make_engine(path: Path, **settings: Any) -> Engine:
    config = EngineConfig(model_path=path, dtype="float32", **settings)
    return build_engine(config, lambda fields: BlockKeys(layout_fingerprint(fields)))


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[Engine]:
    made = make_engine(smollm2_path, num_blocks=1200, max_num_batched_tokens=512)
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> dict[str, list[int]]:
    tokenizer = Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))
    return {f"p{i}": tokenizer.encode(text).ids for i, text in enumerate(VARIED_PROMPTS)}


@pytest.fixture(scope="module")
def batched(engine: Engine, prompts: Mapping[str, list[int]]) -> Outputs:
    """Sixteen at a time, on a cold cache."""
    return generate(engine, prompts, at_once=16)


def generate(
    engine: Engine,
    prompts: Mapping[str, list[int]],
    at_once: int,
    num_tokens: int = NUM_TOKENS,
    **params: Any,
) -> Outputs:
    """Greedy tokens of each prompt, with log-probabilities, `at_once` requests in flight."""
    params = {"temperature": 0.0, "ignore_eos": True, "num_logprobs": 0} | params
    waiting = list(prompts)
    outputs: dict[str, list[TokenOutput]] = {name: [] for name in prompts}
    running: set[str] = set()
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            running.add(name)
            sampling = SamplingParams(max_tokens=num_tokens, **params)
            engine.add_request(Request(name, list(prompts[name]), sampling))
        for event in engine.step():
            if isinstance(event, TokenOutput):
                outputs[event.request_id].append(event)
                if event.finish_reason is not None:
                    running.remove(event.request_id)
    return outputs


def ids(outputs: Outputs) -> dict[str, list[int]]:
    return {name: [output.token_id for output in each] for name, each in outputs.items()}


def test_there_are_twenty_prompts_up_to_three_thousand_tokens(
    prompts: Mapping[str, list[int]],
) -> None:
    lengths = sorted(len(prompt) for prompt in prompts.values())

    assert len(lengths) == 20
    assert lengths[0] == 1
    assert lengths[-1] > 3000 - 200


def test_greedy_tokens_and_log_probabilities_equal_transformers(
    batched: Outputs, prompts: Mapping[str, list[int]], smollm2_path: Path
) -> None:
    """Given our tokens, each must be the oracle's choice after the ones before it.

    By induction that is what its own greedy loop would produce.
    """
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    for name, outputs in batched.items():
        token_ids = [output.token_id for output in outputs]
        sequence = torch.tensor([prompts[name] + token_ids[:-1]])
        with torch.inference_mode():
            logits = oracle(sequence, logits_to_keep=NUM_TOKENS).logits[0]
        expected = torch.log_softmax(logits, -1)

        assert expected.argmax(-1).tolist() == token_ids, name
        ours = torch.tensor([_logprob(output) for output in outputs])
        chosen = expected.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        assert (ours - chosen).abs().max() < 1e-4, name


def _logprob(output: TokenOutput) -> float:
    assert output.logprobs is not None
    return output.logprobs.logprob


def test_alone_gives_the_same_tokens(
    batched: Outputs, prompts: Mapping[str, list[int]], smollm2_path: Path
) -> None:
    alone = make_engine(smollm2_path, num_blocks=400, enable_prefix_caching=False)

    outputs = generate(alone, prompts, at_once=1)

    assert ids(outputs) == ids(batched)
    alone.close()


def test_chunks_of_32_give_the_same_tokens(
    batched: Outputs, prompts: Mapping[str, list[int]], smollm2_path: Path
) -> None:
    chunked = make_engine(
        smollm2_path, num_blocks=1200, max_num_batched_tokens=48, long_prefill_token_threshold=32
    )

    outputs = generate(chunked, prompts, at_once=16)

    assert ids(outputs) == ids(batched)
    chunked.close()


def test_a_warm_prefix_cache_gives_the_same_tokens(
    engine: Engine, batched: Outputs, prompts: Mapping[str, list[int]]
) -> None:
    outputs = generate(engine, prompts, at_once=16)

    assert ids(outputs) == ids(batched)
    for name, prompt in prompts.items():
        assert outputs[name][-1].num_cached_tokens == (len(prompt) - 1) // 16 * 16


def test_seeded_sampling_gives_the_same_tokens_alone_and_among_sixteen(
    engine: Engine, prompts: Mapping[str, list[int]]
) -> None:
    chosen = {"p1": prompts["p1"]}
    params = {"num_tokens": 40, "temperature": 0.9, "top_p": 0.95, "seed": 42}

    alone = generate(engine, chosen, at_once=1, **params)
    among = generate(engine, dict(list(prompts.items())[:16]), at_once=16, **params)

    assert ids(among)["p1"] == ids(alone)["p1"]
    assert len(set(ids(alone)["p1"])) > 5
