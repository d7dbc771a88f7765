"""Stored weights as torch tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.config import DtypeName
from engine.safetensors_file import StoredTensor


def to_tensors(
    weights: Mapping[str, StoredTensor], device: str = "cpu", dtype: DtypeName = "float32"
) -> dict[str, Tensor]:
    """Return tensors; still mapped where neither device nor dtype asks for a copy."""
    target = getattr(torch, dtype)
    moved: dict[int, Tensor] = {}
    for stored in weights.values():
        # Tied tensors stay one tensor.
        if id(stored) not in moved:
            tensor = torch.from_numpy(stored.array).view(getattr(torch, stored.dtype))
            moved[id(stored)] = tensor.to(device=device, dtype=target)
    return {name: moved[id(stored)] for name, stored in weights.items()}
