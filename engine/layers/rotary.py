"""Rotary position embedding, in the half-split form of Hugging Face checkpoints."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import LinearRopeScaling, Llama3RopeScaling, RopeScaling


@dataclass(frozen=True)
class Rotation:
    """The angles of a batch's tokens, ready to apply to any layer's heads."""

    # [T, 1, head_dim]
    cos: Tensor
    # [T, 1, head_dim]; the first half is negated.
    signed_sin: Tensor

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotate `[T, heads, head_dim]`: (a, b) becomes (a cos - b sin, b cos + a sin)."""
        swapped = heads.roll(heads.shape[-1] // 2, -1)
        return torch.addcmul(heads * self.cos, swapped, self.signed_sin)


class RotaryEmbedding:
    """The frequencies of a model."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling, device: str) -> None:
        self._frequencies = rotary_frequencies(head_dim, theta, scaling).to(device)

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation of tokens at these positions."""
        # Angles need float32 whatever the model computes in: positions go into the thousands.
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return Rotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Return the angle per position of each pair of dimensions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (theta**exponents)
    match scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor):
            return frequencies / factor
        case Llama3RopeScaling():
            return _stretch(frequencies, scaling)


def _stretch(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and blend in between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
