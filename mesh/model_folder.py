"""What a model folder must hold before pdmesh installs it; no torch, no weights read."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

import safetensors

SUPPORTED_ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM"})

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_EMBEDDING = "model.embed_tokens.weight"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class InvalidModelFolder(Exception):
    """A folder that pdmesh will not serve; the message says what and where."""


def check_model_folder(folder: Path) -> list[Path]:
    """Return the files to install, or raise with the first problem found."""
    if not folder.is_dir():
        raise InvalidModelFolder(f"{folder}: no such folder")
    _check_config(folder)
    weight_files = _check_weights(folder)
    _check_tokenizer(folder, _num_embeddings(folder, weight_files))
    return sorted({*folder.glob("*.json"), *folder.glob("*.jinja"), *weight_files})


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; anything else is a problem of the folder."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidModelFolder(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise InvalidModelFolder(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidModelFolder(f"{path}: expected a JSON object")
    return value


def _check_config(folder: Path) -> None:
    config = read_json(folder / "config.json")
    tokenizer_config = folder / "tokenizer_config.json"
    configs = [("config.json", config)]
    if tokenizer_config.exists():
        configs.append(("tokenizer_config.json", read_json(tokenizer_config)))
    for name, values in configs:
        if "auto_map" in values:
            raise InvalidModelFolder(
                f"{folder / name}: auto_map asks for the model's own code, which is never run"
            )
    architectures = config.get("architectures") or []
    if not SUPPORTED_ARCHITECTURES.intersection(architectures):
        raise InvalidModelFolder(
            f"{folder / 'config.json'}: architecture {architectures} is not supported;"
            f" supported: {sorted(SUPPORTED_ARCHITECTURES)}"
        )


def _check_weights(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        return _check_shards(folder, read_json(index))
    weights = folder / _WEIGHTS
    if not weights.exists():
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        hint = f"; {', '.join(pickles)} would have to be unpickled, which runs code" * bool(pickles)
        raise InvalidModelFolder(f"{folder}: neither {_WEIGHTS} nor {_INDEX}{hint}")
    if not tensor_names(weights):
        raise InvalidModelFolder(f"{weights}: no tensors")
    return [weights]


def _check_shards(folder: Path, index: dict[str, Any]) -> list[Path]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidModelFolder(f"{folder / _INDEX}: weight_map is missing or empty")
    by_shard: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or PurePosixPath(shard).name != shard:
            raise InvalidModelFolder(
                f"{folder / _INDEX}: {tensor} lies in {shard!r}, which is not a file of the folder"
            )
        by_shard.setdefault(shard, set()).add(tensor)
    for shard, tensors in by_shard.items():
        if not (folder / shard).is_file():
            raise InvalidModelFolder(f"{folder / shard}: missing, but {_INDEX} names it")
        if absent := tensors - tensor_names(folder / shard):
            raise InvalidModelFolder(
                f"{folder / shard}: lacks {sorted(absent)[0]}, which {_INDEX} places there"
            )
    return sorted(folder / shard for shard in by_shard)


def tensor_names(path: Path) -> set[str]:
    """Return the names in a safetensors file whose header is sound."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return set(file.keys())
    except (OSError, safetensors.SafetensorError) as error:
        raise InvalidModelFolder(f"{path}: not a complete safetensors file: {error}") from error


def _num_embeddings(folder: Path, weight_files: list[Path]) -> int:
    for path in weight_files:
        with safetensors.safe_open(path, framework="numpy") as file:
            if _EMBEDDING in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                return int(file.get_slice(_EMBEDDING).get_shape()[0])
    raise InvalidModelFolder(f"{folder}: no weight file has {_EMBEDDING}")


def _check_tokenizer(folder: Path, num_embeddings: int) -> None:
    path = folder / "tokenizer.json"
    tokenizer = read_json(path)
    try:
        ids = [*tokenizer["model"]["vocab"].values()]
        ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
        highest = max(ids)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InvalidModelFolder(f"{path}: no usable vocabulary ({error!r})") from error
    if highest >= num_embeddings:
        raise InvalidModelFolder(
            f"{path}: token id {highest} is beyond the weights' {num_embeddings} embeddings"
        )
