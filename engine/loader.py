"""From a model folder to checked, memory-mapped weights; safetensors only, never pickle."""

import json
import logging
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from torch import Tensor

from engine.config import ModelConfig, ModelError
from engine.safetensors_file import SafetensorsError, map_tensors

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

DtypeName = Literal["auto", "float32", "bfloat16"]


class LoadError(ModelError):
    """A file of the model folder is missing, damaged or does not fit the others."""


def load_weights(
    folder: Path, config: ModelConfig, device: str = "cpu", dtype: DtypeName = "auto"
) -> dict[str, Tensor]:
    """Return the weights by their Hugging Face names, with `lm_head.weight` always among them.

    Tensors stay mapped from the file where neither device nor dtype asks for a
    copy, so that the workers of a machine share one copy in memory.
    """
    try:
        weights = _read_folder(folder)
    except SafetensorsError as error:
        raise LoadError(str(error)) from None
    _tie_embeddings(folder, config, weights)
    _check_tokenizer(folder, weights[EMBEDDING].shape[0])
    target = _target_dtype(folder, weights[EMBEDDING].dtype, device, dtype)
    moved: dict[int, Tensor] = {}
    for name, tensor in weights.items():
        # Tied tensors stay one tensor.
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device=device, dtype=target)
        weights[name] = moved[id(tensor)]
    return weights


def _read_folder(folder: Path) -> dict[str, Tensor]:
    if (folder / _INDEX).exists():
        return _read_shards(folder)
    if (folder / _WEIGHTS).exists():
        return map_tensors(folder / _WEIGHTS)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    hint = f"; {', '.join(pickles)} would have to be unpickled, which runs code" if pickles else ""
    raise LoadError(f"{folder}: neither {_WEIGHTS} nor {_INDEX}{hint}")


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = folder / _INDEX
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{index}: weight_map is missing or empty")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or PurePosixPath(shard).name != shard:
            raise LoadError(
                f"{index}: {tensor} lies in {shard!r}, which is not a file of the folder"
            )
    shards: dict[str, dict[str, Tensor]] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise LoadError(f"{folder / shard}: missing, but {index.name} names it")
        shards[shard] = map_tensors(folder / shard)
    weights: dict[str, Tensor] = {}
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard]:
            raise LoadError(f"{folder / shard}: lacks {tensor}, which {index.name} places there")
        weights[tensor] = shards[shard][tensor]
    return weights


def _tie_embeddings(folder: Path, config: ModelConfig, weights: dict[str, Tensor]) -> None:
    """Leave both the embedding and the output head in `weights`, or raise."""
    embedding, lm_head = weights.get(EMBEDDING), weights.get(LM_HEAD)
    if not config.tie_word_embeddings:
        for name, tensor in ((EMBEDDING, embedding), (LM_HEAD, lm_head)):
            if tensor is None:
                raise LoadError(f"{folder}: no {name}, and tie_word_embeddings is false")
        return
    if embedding is None and lm_head is None:
        raise LoadError(f"{folder}: neither {EMBEDDING} nor {LM_HEAD}")
    if embedding is not None and lm_head is not None and not torch.equal(embedding, lm_head):
        raise LoadError(f"{folder}: tie_word_embeddings is true, but {LM_HEAD} differs")
    tied = embedding if embedding is not None else lm_head
    assert tied is not None
    weights[EMBEDDING] = weights[LM_HEAD] = tied


def _check_tokenizer(folder: Path, num_embeddings: int) -> None:
    """Refuse a tokenizer that can produce ids for which there is no embedding."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    tokenizer = _read_object(path)
    try:
        ids = [*tokenizer["model"]["vocab"].values()]
        ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
        highest = max(ids)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LoadError(f"{path}: no usable vocabulary ({error!r})") from error
    if highest >= num_embeddings:
        raise LoadError(
            f"{path}: token id {highest} is beyond the weights' {num_embeddings} embeddings"
        )


def _target_dtype(folder: Path, stored: torch.dtype, device: str, dtype: DtypeName) -> torch.dtype:
    """What is stored counts, not what config.json says about it."""
    if dtype != "auto":
        return torch.float32 if dtype == "float32" else torch.bfloat16
    if stored == torch.float16 and torch.device(device).type == "cpu":
        logger.info("float16 weights become float32 on a CPU", extra={"model_path": str(folder)})
        return torch.float32
    return stored


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: expected a JSON object")
    return value
