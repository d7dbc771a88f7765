"""Rotary position embedding, in the half-split form of Hugging Face checkpoints."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import RopeScaling
from engine.rope import rotary_frequencies


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
        frequencies = rotary_frequencies(head_dim, theta, scaling)
        self._frequencies = torch.from_numpy(frequencies).to(device)

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation of tokens at these positions."""
        # Angles need float32 whatever the model computes in: positions go into the thousands.
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return Rotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))
