"""The model through the paged cache, against transformers on the same weights."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import ModelConfig
from engine.forward_batch import SequenceSlice, build_batch
from engine.kv_cache import KvCache, KvCacheLayout
from engine.loader import load_weights
from engine.models.llama import LlamaModel, WeightsError, check_weights
from engine.models.registry import Model, build_model
from quality.prompts import SIX_QUESTIONS, VARIED_PROMPTS
from tests.tiny_llama import make_tiny_model, reference_logits

BLOCK_SIZE = 4

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads": {"num_key_value_heads": 4},
    "tied embeddings": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "own head size": {"head_dim": 16},
    "other rope base and epsilon": {"rope_theta": 500.0, "rms_norm_eps": 1e-2},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama 3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral": {"mistral": True, "sliding_window": None},
    "mistral with a window": {"mistral": True, "sliding_window": 7},
}


def load_model(folder: Path) -> Model:
    config = ModelConfig.from_folder(folder)
    return build_model(config, load_weights(folder, config))


def make_cache(model: Model, num_blocks: int, block_size: int = BLOCK_SIZE) -> KvCache:
    assert isinstance(model, LlamaModel)
    config = model.config
    cache = KvCache(
        KvCacheLayout(
            config.num_layers, config.num_kv_heads, config.head_dim, block_size, model.dtype
        ),
        num_blocks,
    )
    # What a block holds before it is written must never reach a result.
    cache.tensor.fill_(float("nan"))
    return cache


def assert_same_logits(actual: Tensor, expected: Tensor) -> None:
    difference = (actual.log_softmax(-1) - expected.log_softmax(-1)).abs()
    # The log-probabilities that a client can ask for are 1e-4 exact; in the far tail
    # of the real model float32 itself is no better than that.
    assert difference.gather(-1, expected.topk(20).indices).max() < 1e-4
    assert difference.max() < 3e-4
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


class Sequence:
    """Tokens that are computed slice by slice."""

    def __init__(self, token_ids: list[int], block_ids: list[int], expected: Tensor) -> None:
        self.token_ids = token_ids
        self.block_ids = block_ids
        self.expected = expected
        self.num_computed = 0

    def next_slice(self, num_tokens: int) -> tuple[SequenceSlice, Tensor]:
        """Return the next slice and the logits that it must give."""
        start, end = self.num_computed, min(self.num_computed + num_tokens, len(self.token_ids))
        self.num_computed = end
        part = SequenceSlice(self.token_ids[start:end], start, self.block_ids, end - start)
        return part, self.expected[start:end]


def make_sequences(model: Any, lengths: list[int], rng: random.Random) -> list[Sequence]:
    num_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    free = list(range(sum(num_blocks)))
    rng.shuffle(free)
    sequences = []
    for length, count in zip(lengths, num_blocks, strict=True):
        token_ids = [rng.randrange(96) for _ in range(length)]
        block_ids = [free.pop() for _ in range(count)]
        sequences.append(Sequence(token_ids, block_ids, reference_logits(model, token_ids)))
    return sequences


@pytest.mark.parametrize("variant", VARIANTS)
def test_mixed_batches_of_chunks_and_decodes_give_transformers_logits(
    variant: str, tmp_path: Path
) -> None:
    reference = make_tiny_model(tmp_path, **VARIANTS[variant])
    model = load_model(tmp_path)
    rng = random.Random(7)
    sequences = make_sequences(reference, [1, 3, 4, 5, 16, 17, 30, 64, 100], rng)
    cache = make_cache(model, sum(len(sequence.block_ids) for sequence in sequences))

    while unfinished := [s for s in sequences if s.num_computed < len(s.token_ids)]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        parts = [sequence.next_slice(rng.choice([1, 1, 1, 2, 3, 9, 32])) for sequence in chosen]
        batch = build_batch([part for part, _ in parts], BLOCK_SIZE)

        logits = model.forward(batch, cache)

        assert logits.dtype == torch.float32
        assert_same_logits(logits, torch.cat([expected for _, expected in parts]))


def test_only_the_wanted_rows_have_logits(tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path)
    model = load_model(tmp_path)
    cache = make_cache(model, 8)
    first, second = [3, 4, 5, 6, 7], [8, 9, 10]

    logits = model.forward(
        build_batch(
            [SequenceSlice(first, 0, [0, 1], 0), SequenceSlice(second, 0, [5], 2)], BLOCK_SIZE
        ),
        cache,
    )
    nothing = model.forward(build_batch([SequenceSlice([1], 5, [0, 1], 0)], BLOCK_SIZE), cache)

    assert_same_logits(logits, reference_logits(reference, second)[1:])
    assert nothing.shape == (0, 96)


def test_a_neighbours_broken_cache_does_not_reach_a_sequence(tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path)
    model = load_model(tmp_path)
    cache = make_cache(model, 8)
    token_ids = [3, 4, 5, 6]
    model.forward(build_batch([SequenceSlice(token_ids[:3], 0, [7], 0)], BLOCK_SIZE), cache)

    # The neighbour is longer, so that this sequence's keys are padded; its cache is NaN.
    logits = model.forward(
        build_batch(
            [SequenceSlice([9], 4, [0, 1], 1), SequenceSlice(token_ids[3:], 3, [7], 1)], BLOCK_SIZE
        ),
        cache,
    )

    assert logits[0].isnan().all()
    assert_same_logits(logits[1:], reference_logits(reference, token_ids)[3:])


def test_bfloat16_weights_compute_in_bfloat16_and_give_float32_logits(tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path).to(torch.bfloat16)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    cache = make_cache(model, 4)
    token_ids = [3, 4, 5, 6, 7]

    logits = model.forward(build_batch([SequenceSlice(token_ids, 0, [2, 0], 5)], BLOCK_SIZE), cache)

    assert model.dtype == cache.tensor.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    difference = logits.log_softmax(-1) - reference_logits(reference, token_ids).log_softmax(-1)
    assert difference.abs().mean() < 0.05


def test_weights_that_the_config_does_not_describe_are_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    weights = load_weights(tmp_path, config)
    norm = "model.layers.1.input_layernorm.weight"

    with pytest.raises(WeightsError, match=f"{norm} is missing"):
        check_weights(config, {name: weights[name] for name in weights if name != norm})
    with pytest.raises(WeightsError, match=r"norm.weight has shape \[31\].* implies \[32\]"):
        check_weights(config, {**weights, norm: weights[norm][:31]})
    with pytest.raises(WeightsError, match=r"q_proj.bias is a tensor that config.json has no"):
        check_weights(config, {**weights, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    check_weights(
        config, {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": weights[norm]}
    )


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> tuple[Model, Any, Any]:
    reference = AutoModelForCausalLM.from_pretrained(smollm2_path).eval()
    return load_model(smollm2_path), reference, AutoTokenizer.from_pretrained(smollm2_path)


def test_the_default_model_gives_transformers_logits(smollm2: tuple[Model, Any, Any]) -> None:
    model, reference, tokenizer = smollm2
    cache = make_cache(model, 160, block_size=16)
    # All but the longest: chunks of 32 of all of them side by side.
    sequences = []
    for index, prompt in enumerate(VARIED_PROMPTS[:18]):
        token_ids = tokenizer(prompt).input_ids
        blocks = list(range(index * 8, index * 8 + 8))
        sequences.append(Sequence(token_ids, blocks, reference_logits(reference, token_ids)))

    while unfinished := [s for s in sequences if s.num_computed < len(s.token_ids)]:
        parts = [sequence.next_slice(32) for sequence in unfinished]
        logits = model.forward(build_batch([part for part, _ in parts], 16), cache)
        assert_same_logits(logits, torch.cat([expected for _, expected in parts]))


@pytest.mark.parametrize(("kind", "prompt", "answer"), SIX_QUESTIONS)
def test_the_default_model_answers(
    kind: str, prompt: str, answer: str, smollm2: tuple[Model, Any, Any]
) -> None:
    model, _, tokenizer = smollm2
    cache = make_cache(model, 8, block_size=16)
    messages = [{"role": "user", "content": prompt}]
    if kind == "chat":
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    new_token_ids = tokenizer(prompt).input_ids
    num_computed, output_token_ids = 0, []

    for _ in range(10):
        part = SequenceSlice(new_token_ids, num_computed, list(range(8)))
        num_computed += len(new_token_ids)
        new_token_ids = model.forward(build_batch([part], 16), cache).argmax(-1).tolist()
        output_token_ids += new_token_ids
        if answer in tokenizer.decode(output_token_ids):
            return

    pytest.fail(tokenizer.decode(output_token_ids))
