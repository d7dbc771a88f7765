"""A model folder's files and whether they fit each other; knows neither torch nor transport."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class InvalidFolder(Exception):
    """A file is missing, damaged, or does not fit the others; the message says which."""


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidFolder(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise InvalidFolder(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidFolder(f"{path}: expected a JSON object")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files; a folder that only has pickles has none."""
    if (folder / INDEX).exists():
        return [folder / shard for shard in sorted(set(weight_map(folder).values()))]
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    hint = f"; {', '.join(pickles)} would have to be unpickled, which runs code" if pickles else ""
    raise InvalidFolder(f"{folder}: neither {WEIGHTS} nor {INDEX}{hint}")


def weight_map(folder: Path) -> dict[str, str]:
    """Which tensor lies in which file, by the index; every file is there, and in the folder."""
    index = folder / INDEX
    placed = read_object(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise InvalidFolder(f"{index}: weight_map is missing or empty")
    for tensor, shard in placed.items():
        if not isinstance(shard, str) or not shard or PurePosixPath(shard).name != shard:
            raise InvalidFolder(
                f"{index}: {tensor} lies in {shard!r}, which is not a file of the folder"
            )
        if not (folder / shard).is_file():
            raise InvalidFolder(f"{folder / shard}: missing, but {INDEX} names it")
    return placed


def placed_tensors(folder: Path, tensors_by_file: Mapping[str, Collection[str]]) -> dict[str, str]:
    """The file of each tensor; raises where one is not in the file that the index names."""
    if not (folder / INDEX).exists():
        return {tensor: name for name, tensors in tensors_by_file.items() for tensor in tensors}
    placed = weight_map(folder)
    for tensor, shard in placed.items():
        if tensor not in tensors_by_file[shard]:
            raise InvalidFolder(f"{folder / shard}: lacks {tensor}, which {INDEX} places there")
    return placed


def check_tokenizer(folder: Path, num_embeddings: int) -> None:
    """Refuse a tokenizer that can produce ids for which there is no embedding."""
    path = folder / TOKENIZER
    tokenizer = read_object(path)
    try:
        ids = [*tokenizer["model"]["vocab"].values()]
        ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
        highest = max(ids)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InvalidFolder(f"{path}: no usable vocabulary ({error!r})") from error
    if highest >= num_embeddings:
        raise InvalidFolder(
            f"{path}: token id {highest} is beyond the weights' {num_embeddings} embeddings"
        )
