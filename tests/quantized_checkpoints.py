"""Checkpoints in the layouts of GPTQ and AWQ, packed word by word from known integers."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file

from tests.tiny_llama import make_tiny_model

Array = npt.NDArray[Any]

# AutoAWQ: nibble i of a word is this one of eight output channels.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": True}


@dataclass(frozen=True)
class Codes:
    """A matrix of k inputs and n outputs, as its quantizer had it."""

    # uint8[k, n], 0 to 15.
    codes: Array
    # float16[groups, n]
    scales: Array
    # uint8[groups, n]
    zeros: Array
    # For each input, its group.
    g_idx: Array

    @property
    def values(self) -> Array:
        """float32[n, k]: exact, since products of float16 and 5 bits fit."""
        codes = self.codes.astype(np.float32) - self.zeros[self.g_idx]
        return np.asarray((self.scales.astype(np.float32)[self.g_idx] * codes).T)


def make_codes(
    k: int, n: int, group_size: int, *, symmetric: bool, scattered: bool = False, seed: int = 0
) -> Codes:
    rng = np.random.default_rng(seed)
    num_groups = k // group_size
    g_idx = np.arange(k) // group_size
    return Codes(
        rng.integers(0, 16, (k, n), dtype=np.uint8),
        rng.uniform(0.01, 0.05, (num_groups, n)).astype(np.float16),
        np.full((num_groups, n), 8, np.uint8)
        if symmetric
        else rng.integers(0, 16, (num_groups, n), dtype=np.uint8),
        rng.permutation(g_idx) if scattered else g_idx,
    )


def gptq_tensors(matrix: Codes, *, first_format: bool) -> dict[str, Array]:
    k, n = matrix.codes.shape
    qweight = np.zeros((k // 8, n), dtype=np.uint32)
    for i in range(k):
        qweight[i // 8] |= matrix.codes[i].astype(np.uint32) << np.uint32(4 * (i % 8))
    qzeros = np.zeros((len(matrix.zeros), n // 8), dtype=np.uint32)
    for i in range(n):
        qzeros[:, i // 8] |= matrix.zeros[:, i].astype(np.uint32) << np.uint32(4 * (i % 8))
    if first_format:
        qzeros -= np.uint32(0x11111111)
    return {
        "qweight": qweight.view(np.int32),
        "qzeros": qzeros.view(np.int32),
        "scales": matrix.scales,
        "g_idx": matrix.g_idx.astype(np.int32),
    }


def awq_tensors(matrix: Codes) -> dict[str, Array]:
    def pack(codes: Array) -> Array:
        rows, n = codes.shape
        words = np.zeros((rows, n // 8), dtype=np.uint32)
        for column in range(n // 8):
            for i, channel in enumerate(AWQ_ORDER):
                code = codes[:, column * 8 + channel].astype(np.uint32)
                words[:, column] |= code << np.uint32(4 * i)
        return words.view(np.int32)

    return {
        "qweight": pack(matrix.codes),
        "qzeros": pack(matrix.zeros),
        "scales": matrix.scales,
    }


def make_quantized_model(
    folder: Path,
    quantization_config: dict[str, Any],
    tensors_of: Callable[[Codes], dict[str, Array]],
    **choices: Any,
) -> Any:
    """Write a quantized checkpoint, and return transformers' model of its exact values."""
    model = make_tiny_model(folder, **SHAPE)
    stored: dict[str, Array] = {}
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        values = parameter.detach().numpy()
        if not name.endswith("proj.weight"):
            stored[name] = values.astype(np.float16)
            values = stored[name].astype(np.float32)
        else:
            matrix = make_codes(*reversed(values.shape), seed=seed, **choices)
            values = matrix.values
            for part, array in tensors_of(matrix).items():
                stored[f"{name.removesuffix('weight')}{part}"] = array
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values))
    save_file(
        {key: np.ascontiguousarray(a) for key, a in stored.items()}, folder / "model.safetensors"
    )
    edit_config(folder, quantization_config=quantization_config)
    return model


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
