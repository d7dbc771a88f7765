"""Weights as the kernels read them: packed once, and kept in a file that all workers read."""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import xxhash

from engine.config import INTEGER_WEIGHTS, ModelConfig
from engine.kernels.formats import WeightFormat
from engine.kernels.library import LayerStruct, LinearStruct, address, linear_struct
from engine.kernels.native_llama import PackedModel, pack_model
from engine.kernels.pack import ALIGNMENT, PACK_VERSION, PackedMatrix, large_pages
from engine.kernels.quantize import MatrixWeights
from engine.loader import LoadError, check_weights, load_weights
from engine.model_revision import model_revision
from engine.quantized_layouts import ScatteredGroups, Weight, as_float32

logger = logging.getLogger(__name__)

# How weights are stored in memory.
WeightsName = Literal["float32", "bfloat16", "int8", "int4", "int4_channel"]
Array = npt.NDArray[Any]

# Where a converted model keeps the quantized file that it was made from.
SOURCE_GGUF = "source.gguf"

_FOLDER = ".packed"
_LENGTH_BYTES = 8
_HEADER_KEYS = {"matrices", "arrays", "num_bytes", "checksum"}
_MATRICES = ("qkv", "output", "gate_up", "down")
_NORMS = ("input_norm", "post_attention_norm")


class StalePackedWeights(Exception):
    """The file is not what its name promises: cut off, or of another layout."""


def has_quantized_source(folder: Path) -> bool:
    """Whether the folder has the quantized values that its weights were made from."""
    return (folder / SOURCE_GGUF).exists()


def load_packed(
    folder: Path, config: ModelConfig, name: WeightsName, cache_folder: Path | None = None
) -> PackedModel:
    """Read the model's packed weights, after packing them if no process has done so yet."""
    cache_folder = cache_folder / _place_of(folder) if cache_folder else folder / _FOLDER
    path = cache_folder / f"{name}-{_key(folder, name)}"
    try:
        # What is there is whole: to read it takes no lock, and no folder that can be written.
        model = _open(path) or _make(path, folder, config, name)
    except OSError as error:
        logger.warning(
            "packed weights cannot be kept, each worker packs its own",
            extra={"path": str(path), "why": str(error)},
        )
        return _pack(folder, config, name)
    # It has all that the kernels' model asks of a PackedModel.
    return cast(PackedModel, model)


def _place_of(folder: Path) -> str:
    """A model's own part of a folder that several share: what is older there is its own."""
    resolved = folder.resolve()
    return f"{resolved.name}-{hashlib.sha256(bytes(resolved)).hexdigest()[:8]}"


class StoredModel:
    """A model's packed weights, read from their file into large pages.

    A mapping of the file would share its pages between workers, but small ones: a step, which
    reads all weights once, then takes twice as long (docs/benchmarks.md).
    """

    def __init__(self, path: Path) -> None:
        """Raises StalePackedWeights, or FileNotFoundError."""
        header, data_start = _read_header(path)
        data = large_pages(header["num_bytes"])
        with path.open("rb", buffering=0) as file:
            file.seek(data_start)
            _read_into(file, data, path)
        digest = _digest_of(header)
        digest.update(data.data)
        if digest.hexdigest() != header["checksum"]:
            raise StalePackedWeights(f"{path}: its checksum is not that of its content")
        data.flags.writeable = False
        self.arena: dict[str, Array] = {
            key: data[begin:end].view(dtype)
            for key, (dtype, begin, end) in header["arrays"].items()
        }
        self._matrices = {
            key: PackedMatrix(
                WeightFormat(format_number),
                n,
                k,
                self.arena[f"{key}.data"],
                self.arena.get(f"{key}.scales"),
            )
            for key, (format_number, n, k) in header["matrices"].items()
        }

    def linear(self, name: str) -> LinearStruct:
        return linear_struct(self._matrices[name])

    def layer(self, index: int) -> LayerStruct:
        return LayerStruct(
            *(address(self.arena[f"{index}.{name}"]) for name in _NORMS),
            *(self.linear(f"{index}.{name}") for name in _MATRICES),
        )


def source_weights(
    folder: Path, config: ModelConfig, name: WeightsName
) -> Mapping[str, Array | MatrixWeights]:
    """The model's weights, checked; the quantized values that it was made from where it has them.

    Raises:
        LoadError: they cannot be stored as `name` without being rounded a second time.
    """
    stored = load_weights(folder, config)
    check_weights(config, {key: tensor.shape for key, tensor in stored.items()})
    if name in ("int4", "int4_channel"):
        for key, weight in stored.items():
            if isinstance(weight, ScatteredGroups):
                raise LoadError(
                    f"{folder}: {key}: its groups are in act-order (desc_act), and {name} needs"
                    f" inputs that share a scale to be neighbours; quantization none or int8"
                    f" serves this checkpoint"
                )
    source: dict[str, Any] = {}
    if name in INTEGER_WEIGHTS and has_quantized_source(folder):
        # Imported here: of the files that workers read, mostly none is a GGUF.
        from engine.kernels.gguf_weights import read_gguf_weights

        source = read_gguf_weights(folder / SOURCE_GGUF, config.num_heads, config.num_kv_heads)
    return _Weights(stored, source)


class _Weights(Mapping[str, Array | MatrixWeights]):
    """The checkpoint's weights; as the source's own quantized values where these are equal."""

    def __init__(self, stored: Mapping[str, Weight], source: Mapping[str, Any]) -> None:
        self._stored = stored
        self._source = source

    def __getitem__(self, name: str) -> Array | MatrixWeights:
        weight = self._stored[name]
        if isinstance(weight, MatrixWeights):
            return weight
        values = as_float32(weight)
        quantized = self._source.get(name)
        if isinstance(quantized, MatrixWeights) and np.array_equal(quantized.dequantize(), values):
            return quantized
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _make(path: Path, folder: Path, config: ModelConfig, name: WeightsName) -> StoredModel:
    """Pack the weights and keep them, unless another process did so while this one waited."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        model = _open(path)
        if model is None:
            _write(path, _pack(folder, config, name), config)
            _remove_others(path, name)
            model = StoredModel(path)
        return model


def _pack(folder: Path, config: ModelConfig, name: WeightsName) -> PackedModel:
    logger.info("packing weights, once", extra={"model_path": str(folder), "weights": name})
    weights = source_weights(folder, config, name)
    return pack_model(config, weights, WeightFormat.from_name(name))


def _key(folder: Path, name: WeightsName) -> str:
    """Changes with the weights and with the layout, which is the same on every CPU."""
    files = ["*.safetensors", SOURCE_GGUF] if name in INTEGER_WEIGHTS else ["*.safetensors"]
    revision = model_revision(folder, files)
    return hashlib.sha256(f"{revision} {PACK_VERSION}".encode()).hexdigest()[:16]


def _write(path: Path, packed: PackedModel, config: ModelConfig) -> None:
    """Write to a file of another name and rename it, so that no reader sees half of it."""
    arrays, matrices = _contents(packed, config)
    places: dict[str, tuple[str, int, int]] = {}
    end = 0
    for key, array in arrays.items():
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        end = begin + array.nbytes
        places[key] = (array.dtype.str, begin, end)
    content = {"matrices": matrices, "arrays": places, "num_bytes": end}
    checksum = _checksum(content, arrays)
    header = json.dumps({**content, "checksum": checksum}).encode()
    header += b" " * (-(_LENGTH_BYTES + len(header)) % ALIGNMENT)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
        for key, array in arrays.items():
            file.seek(_LENGTH_BYTES + len(header) + places[key][1])
            file.write(array.data)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _checksum(content: Mapping[str, Any], arrays: Mapping[str, Array]) -> str:
    """Of the header and of the data as the file has it, with zeros between the arrays."""
    digest = _digest_of(content)
    at = 0
    for key, array in arrays.items():
        _, begin, end = content["arrays"][key]
        digest.update(bytes(begin - at))
        digest.update(array.data)
        at = end
    return digest.hexdigest()


def _digest_of(header: Mapping[str, Any]) -> xxhash.xxh3_64:
    """Begins a checksum with what says where the data is and what it means."""
    described = [header[key] for key in sorted(_HEADER_KEYS - {"checksum"})]
    return xxhash.xxh3_64(json.dumps(described).encode())


def _contents(
    packed: PackedModel, config: ModelConfig
) -> tuple[dict[str, Array], dict[str, tuple[int, int, int]]]:
    layers = range(config.num_layers)
    matrices = ["embedding", *([] if config.tie_word_embeddings else ["head"])]
    matrices += [f"{index}.{name}" for index in layers for name in _MATRICES]
    norms = [f"{index}.{name}" for index in layers for name in _NORMS]
    arrays = {name: packed.arena[name] for name in ("final_norm", *norms)}
    shapes: dict[str, tuple[int, int, int]] = {}
    for name in matrices:
        linear = packed.linear(name)
        shapes[name] = (linear.format, linear.n, linear.k)
        arrays[f"{name}.data"] = packed.arena[f"{name}.data"]
        if linear.scales:
            arrays[f"{name}.scales"] = packed.arena[f"{name}.scales"]
    return arrays, shapes


def _open(path: Path) -> StoredModel | None:
    """The packed weights, if they are there and whole."""
    try:
        return StoredModel(path)
    except FileNotFoundError:
        return None
    except StalePackedWeights as error:
        logger.warning("packed weights are made again", extra={"why": str(error)})
        return None


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and where the data starts; the file must have all of the data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        data_start = _LENGTH_BYTES + length
        num_bytes = os.fstat(file.fileno()).st_size
        if data_start > num_bytes:
            raise StalePackedWeights(f"{path}: cut off within its header")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise StalePackedWeights(f"{path}: header: {error}") from None
    if not isinstance(header, dict) or header.keys() != _HEADER_KEYS:
        raise StalePackedWeights(f"{path}: header: not one of packed weights")
    if data_start + header["num_bytes"] != num_bytes:
        raise StalePackedWeights(f"{path}: {num_bytes} bytes are not what its header describes")
    return header, data_start


def _remove_others(path: Path, name: WeightsName) -> None:
    """Remove what older weights or layouts left."""
    for other in path.parent.glob(f"{name}-*"):
        if other != path:
            other.unlink()


def _read_into(file: FileIO, data: Array, path: Path) -> None:
    view = data.data
    while view:
        num_read = file.readinto(view)
        if not num_read:
            raise StalePackedWeights(f"{path}: cut off while it was read")
        view = view[num_read:]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process pack and the others wait for it."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
