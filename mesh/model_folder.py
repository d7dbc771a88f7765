"""What a model folder must hold before pdmesh installs it; no torch, no weights read."""

from pathlib import Path

import safetensors

from checkpoint.folder import (
    WEIGHTS,
    InvalidFolder,
    check_tokenizer,
    placed_tensors,
    read_object,
    weight_files,
)

SUPPORTED_ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM"})

_EMBEDDING = "model.embed_tokens.weight"


def check_model_folder(folder: Path) -> list[Path]:
    """Return the files to install, or raise with the first problem found."""
    if not folder.is_dir():
        raise InvalidFolder(f"{folder}: no such folder")
    _check_config(folder)
    weight_files = _check_weights(folder)
    check_tokenizer(folder, _num_embeddings(folder, weight_files))
    return sorted({*folder.glob("*.json"), *folder.glob("*.jinja"), *weight_files})


def _check_config(folder: Path) -> None:
    config = read_object(folder / "config.json")
    tokenizer_config = folder / "tokenizer_config.json"
    configs = [("config.json", config)]
    if tokenizer_config.exists():
        configs.append(("tokenizer_config.json", read_object(tokenizer_config)))
    for name, values in configs:
        if "auto_map" in values:
            raise InvalidFolder(
                f"{folder / name}: auto_map asks for the model's own code, which is never run"
            )
    architectures = config.get("architectures") or []
    if not SUPPORTED_ARCHITECTURES.intersection(architectures):
        raise InvalidFolder(
            f"{folder / 'config.json'}: architecture {architectures} is not supported;"
            f" supported: {sorted(SUPPORTED_ARCHITECTURES)}"
        )


def _check_weights(folder: Path) -> list[Path]:
    paths = weight_files(folder)
    names = {path.name: tensor_names(path) for path in paths}
    if not placed_tensors(folder, names):
        raise InvalidFolder(f"{folder / WEIGHTS}: no tensors")
    return paths


def tensor_names(path: Path) -> set[str]:
    """Return the names in a safetensors file whose header is sound."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return set(file.keys())
    except (OSError, safetensors.SafetensorError) as error:
        raise InvalidFolder(f"{path}: not a complete safetensors file: {error}") from error


def _num_embeddings(folder: Path, weight_files: list[Path]) -> int:
    for path in weight_files:
        with safetensors.safe_open(path, framework="numpy") as file:
            if _EMBEDDING in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                return int(file.get_slice(_EMBEDDING).get_shape()[0])
    raise InvalidFolder(f"{folder}: no weight file has {_EMBEDDING}")
