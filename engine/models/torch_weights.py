"""Stored weights as torch tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.config import DtypeName
from engine.quantized_layouts import Weight, as_stored


def to_tensors(
    weights: Mapping[str, Weight], device: str = "cpu", dtype: DtypeName = "float32"
) -> dict[str, Tensor]:
    """Return tensors; still mapped where neither device nor dtype asks for a copy."""
    target = getattr(torch, dtype)
    moved: dict[int, Tensor] = {}
    for weight in weights.values():
        # Tied tensors stay one tensor.
        if id(weight) not in moved:
            stored = as_stored(weight)
            tensor = torch.from_numpy(stored.array).view(getattr(torch, stored.dtype))
            moved[id(weight)] = tensor.to(device=device, dtype=target)
    return {name: moved[id(weight)] for name, weight in weights.items()}
