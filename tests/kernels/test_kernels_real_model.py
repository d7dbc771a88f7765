"""The default model itself, where its wheel is at hand: against transformers, in every format."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.kernels.formats import KvFormat, WeightFormat
from engine.kernels.gguf_weights import dequantized, read_gguf_weights
from engine.kernels.library import Library
from engine.kernels.native_llama import NativeLlama, pack_model
from tests.kernels.kernel_models import Piece, Runner, rope_tables

Array = npt.NDArray[Any]

# "The capital of France is Paris. ..." and so on: any plain English serves.
TOKEN_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 657, 314, 260, 8206, 2240, 281, 260, 1160, 284]


@dataclass(frozen=True)
class SmolLm2:
    num_layers: int = 30
    hidden_size: int = 576
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 1536
    vocab_size: int = 49152
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True


@pytest.fixture(scope="module")
def weights(smollm2_path: Path) -> dict[str, Any]:
    return read_gguf_weights(smollm2_path / "source.gguf", 9, 3)


@pytest.fixture(scope="module")
def reference(weights: dict[str, Any]) -> Array:
    """transformers' float32 logits on the same dequantized weights."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    state = {name: torch.from_numpy(array.copy()) for name, array in dequantized(weights).items()}
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.inference_mode():
        logits: Array = model(torch.tensor([TOKEN_IDS])).logits[0].numpy()
    return logits


@pytest.fixture
def runner(
    library: Library, weights: dict[str, Any], request: pytest.FixtureRequest
) -> Iterator[Runner]:
    weight_format, kv_format = request.param
    packed = pack_model(SmolLm2(), weights, weight_format)
    rope = rope_tables(64, 64, theta=100000.0)
    with NativeLlama(library, SmolLm2(), packed, rope, kv_format=kv_format, num_threads=2) as model:
        yield Runner(model, 8, 16)


@pytest.mark.parametrize(
    ("runner", "largest_kl"),
    [
        ((WeightFormat.FLOAT32, KvFormat.FLOAT32), 1e-9),
        ((WeightFormat.BFLOAT16, KvFormat.BFLOAT16), 1e-3),
        ((WeightFormat.INT8, KvFormat.BFLOAT16), 0.02),
        ((WeightFormat.INT8_GROUPED, KvFormat.BFLOAT16), 0.02),
        ((WeightFormat.INT4, KvFormat.BFLOAT16), 0.02),
        ((WeightFormat.INT4, KvFormat.INT8), 0.03),
        ((WeightFormat.INT4, KvFormat.FP8_E4M3), 0.05),
    ],
    indirect=["runner"],
    ids=lambda value: "-".join(f.name for f in value) if isinstance(value, tuple) else "",
)
def test_logits_are_close_to_those_of_transformers(
    runner: Runner, reference: Array, largest_kl: float
) -> None:
    logits = runner.run(Piece(TOKEN_IDS, 0, [3]))

    expected, got = _log_softmax(reference), _log_softmax(logits)
    divergence = (np.exp(expected) * (expected - got)).sum(axis=-1).mean()
    assert divergence < largest_kl


@pytest.mark.parametrize("runner", [(WeightFormat.FLOAT32, KvFormat.FLOAT32)], indirect=True)
def test_float32_logits_are_those_of_transformers(runner: Runner, reference: Array) -> None:
    logits = runner.run(Piece(TOKEN_IDS, 0, [3]))

    assert np.abs(logits - reference).max() < 1e-3


def _log_softmax(logits: Array) -> Array:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True)))
