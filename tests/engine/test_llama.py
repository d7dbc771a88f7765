"""The model through the paged cache, against transformers on the same weights."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import BackendName, DtypeName, EngineConfig, ModelConfig
from engine.forward_batch import SequenceSlice, build_batch
from engine.kv_cache import KvCache
from engine.loader import WeightsError, check_weights, load_weights
from engine.models.registry import BackendError, LoadedModel, load_model
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

NOT_NATIVE = {"biases": "matrices have biases", "mistral with a window": "sliding window"}

BACKENDS: tuple[BackendName, ...] = ("native", "torch")


def load(
    folder: Path,
    backend: BackendName,
    *,
    block_size: int = BLOCK_SIZE,
    dtype: DtypeName | Literal["auto"] = "auto",
) -> LoadedModel:
    config = EngineConfig(
        folder, backend=backend, block_size=block_size, dtype=dtype, num_threads=2
    )
    model_config = ModelConfig.from_folder(folder)
    return load_model(config, model_config, model_config.max_position_embeddings)


def make_cache(loaded: LoadedModel, num_blocks: int) -> KvCache:
    cache = KvCache(loaded.layout, num_blocks)
    # What a block holds before it is written must never reach a result.
    cache.tensor.fill_(float("nan"))
    return cache


def assert_same_logits(logits: npt.NDArray[np.float32], expected: Tensor) -> None:
    actual = torch.from_numpy(logits)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_mixed_batches_of_chunks_and_decodes_give_transformers_logits(
    variant: str, backend: BackendName, tmp_path: Path
) -> None:
    reference = make_tiny_model(tmp_path, **VARIANTS[variant])
    if backend == "native" and variant in NOT_NATIVE:
        with pytest.raises(BackendError, match=NOT_NATIVE[variant]):
            load(tmp_path, backend)
        return
    loaded = load(tmp_path, backend)
    rng = random.Random(7)
    sequences = make_sequences(reference, [1, 3, 4, 5, 16, 17, 30, 64, 100], rng)
    cache = make_cache(loaded, sum(len(sequence.block_ids) for sequence in sequences))

    while unfinished := [s for s in sequences if s.num_computed < len(s.token_ids)]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        parts = [sequence.next_slice(rng.choice([1, 1, 1, 2, 3, 9, 32])) for sequence in chosen]
        batch = build_batch([part for part, _ in parts], BLOCK_SIZE)

        layers = loaded.model.begin(batch, cache)
        logits = layers.advance(1)
        if layers.num_layers_left:
            # Others come in between.
            loaded.model.forward(batch, cache)
            logits = layers.advance(layers.num_layers_left)

        assert logits is not None
        assert logits.dtype == np.float32
        assert_same_logits(logits, torch.cat([expected for _, expected in parts]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_wanted_rows_have_logits(backend: BackendName, tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path)
    loaded = load(tmp_path, backend)
    model, cache = loaded.model, make_cache(loaded, 8)
    first, second = [3, 4, 5, 6, 7], [8, 9, 10]

    batch = build_batch(
        [SequenceSlice(first, 0, [0, 1], 0), SequenceSlice(second, 0, [5], 2)], BLOCK_SIZE
    )
    logits = model.forward(batch, cache).copy()
    nothing = model.forward(build_batch([SequenceSlice([1], 5, [0, 1], 0)], BLOCK_SIZE), cache)

    assert_same_logits(logits, reference_logits(reference, second)[1:])
    assert nothing.shape == (0, 96)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_neighbours_broken_cache_does_not_reach_a_sequence(
    backend: BackendName, tmp_path: Path
) -> None:
    reference = make_tiny_model(tmp_path)
    loaded = load(tmp_path, backend)
    model, cache = loaded.model, make_cache(loaded, 8)
    token_ids = [3, 4, 5, 6]
    model.forward(build_batch([SequenceSlice(token_ids[:3], 0, [7], 0)], BLOCK_SIZE), cache)

    # The neighbour is longer, so that this sequence's keys are padded; its cache is NaN.
    logits = model.forward(
        build_batch(
            [SequenceSlice([9], 4, [0, 1], 1), SequenceSlice(token_ids[3:], 3, [7], 1)], BLOCK_SIZE
        ),
        cache,
    )

    assert np.isnan(logits[0]).all()
    assert_same_logits(logits[1:], reference_logits(reference, token_ids)[3:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_weights_have_a_bfloat16_cache_and_give_float32_logits(
    backend: BackendName, tmp_path: Path
) -> None:
    reference = make_tiny_model(tmp_path).to(torch.bfloat16)
    reference.save_pretrained(tmp_path)
    loaded = load(tmp_path, backend)
    model, cache = loaded.model, make_cache(loaded, 4)
    token_ids = [3, 4, 5, 6, 7]

    logits = model.forward(build_batch([SequenceSlice(token_ids, 0, [2, 0], 5)], BLOCK_SIZE), cache)

    assert (loaded.layout.dtype, loaded.layout.weights) == ("bfloat16", "bfloat16")
    assert logits.dtype == np.float32
    expected = reference_logits(reference, token_ids).log_softmax(-1)
    difference = torch.from_numpy(logits).log_softmax(-1) - expected
    assert difference.abs().mean() < 0.05


def test_weights_that_the_config_does_not_describe_are_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    shapes = {name: tensor.shape for name, tensor in load_weights(tmp_path, config).items()}
    norm = "model.layers.1.input_layernorm.weight"

    with pytest.raises(WeightsError, match=f"{norm} is missing"):
        check_weights(config, {name: shapes[name] for name in shapes if name != norm})
    with pytest.raises(WeightsError, match=r"norm.weight has shape \[31\].* implies \[32\]"):
        check_weights(config, {**shapes, norm: (31,)})
    with pytest.raises(WeightsError, match=r"q_proj.bias is a tensor that config.json has no"):
        check_weights(config, {**shapes, "model.layers.0.self_attn.q_proj.bias": (32,)})
    check_weights(config, {**shapes, "model.layers.0.self_attn.rotary_emb.inv_freq": (4,)})


@dataclass(frozen=True)
class Smollm2:
    """The default model in float32, on one backend."""

    loaded: LoadedModel
    tokenizer: Any


@pytest.fixture(scope="module", params=BACKENDS)
def smollm2(smollm2_path: Path, request: pytest.FixtureRequest) -> Smollm2:
    loaded = load(smollm2_path, request.param, block_size=16, dtype="float32")
    return Smollm2(loaded, AutoTokenizer.from_pretrained(smollm2_path))


@pytest.fixture(scope="module")
def expected_logits(smollm2_path: Path) -> list[tuple[list[int], Tensor]]:
    """Token ids and transformers' logits of all prompts but the longest."""
    reference = AutoModelForCausalLM.from_pretrained(smollm2_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    token_ids = [tokenizer(prompt).input_ids for prompt in VARIED_PROMPTS[:18]]
    return [(ids, reference_logits(reference, ids)) for ids in token_ids]


def test_the_default_model_gives_transformers_logits(
    smollm2: Smollm2, expected_logits: list[tuple[list[int], Tensor]]
) -> None:
    cache = make_cache(smollm2.loaded, 160)
    sequences = [
        Sequence(token_ids, list(range(index * 8, index * 8 + 8)), expected)
        for index, (token_ids, expected) in enumerate(expected_logits)
    ]

    # Chunks of 32 of all of them side by side.
    while unfinished := [s for s in sequences if s.num_computed < len(s.token_ids)]:
        parts = [sequence.next_slice(32) for sequence in unfinished]
        batch = build_batch([part for part, _ in parts], 16)
        logits = smollm2.loaded.model.forward(batch, cache)
        assert_same_logits(logits, torch.cat([expected for _, expected in parts]))


@pytest.mark.parametrize(("kind", "prompt", "answer"), SIX_QUESTIONS)
def test_the_default_model_answers(kind: str, prompt: str, answer: str, smollm2: Smollm2) -> None:
    model, tokenizer = smollm2.loaded.model, smollm2.tokenizer
    cache = make_cache(smollm2.loaded, 8)
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
