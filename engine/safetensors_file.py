"""One safetensors file: its header distrusted, its tensors mapped without a copy."""

import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt


class SafetensorsError(Exception):
    """A file that cannot be used; the message says what and where."""


# As torch names them.
StoredDtype = Literal["float32", "float16", "bfloat16", "int8", "int32", "int64"]
FLOAT_DTYPES: frozenset[StoredDtype] = frozenset({"float32", "float16", "bfloat16"})


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in the data that follows the header."""

    dtype: StoredDtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor as its file has it."""

    dtype: StoredDtype
    # bfloat16, which numpy does not have, as the uint16 of its bits.
    array: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def equals(self, other: "StoredTensor") -> bool:
        return self.dtype == other.dtype and np.array_equal(self.array, other.array)

    def to_float32(self) -> npt.NDArray[np.float32]:
        """The same values; without a copy where they are float32 already."""
        if self.dtype == "bfloat16":
            return (self.array.astype(np.uint32) << 16).view(np.float32)
        return self.array.astype(np.float32, copy=False)


_DTYPES: dict[str, StoredDtype] = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    # Of quantized checkpoints.
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
}
_ARRAY_DTYPES: dict[StoredDtype, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}
# The format's own limit.
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 8
_MAX_OFFSET = 1 << 62
_LENGTH_BYTES = 8


def map_tensors(path: Path) -> dict[str, StoredTensor]:
    """Map the file and return its tensors; processes that map one file share its memory."""
    with path.open("rb") as file:
        entries, data_start = _read_header(path, file.fileno())
        # Copy-on-write: torch wants memory that it may write, and nothing ever does.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    memory.madvise(mmap.MADV_WILLNEED)
    data = np.frombuffer(memory, dtype=np.uint8)
    return {name: _view(data, data_start, entry) for name, entry in entries.items()}


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return what the file holds, once its header is known to be sound."""
    with path.open("rb") as file:
        return _read_header(path, file.fileno())[0]


def _view(data: npt.NDArray[np.uint8], data_start: int, entry: TensorEntry) -> StoredTensor:
    part = data[data_start + entry.begin : data_start + entry.end]
    dtype = _ARRAY_DTYPES[entry.dtype]
    if (data_start + entry.begin) % dtype.itemsize:
        part = part.copy()
    return StoredTensor(entry.dtype, part.view(dtype).reshape(entry.shape))


def _read_header(path: Path, descriptor: int) -> tuple[dict[str, TensorEntry], int]:
    """Return the entries and the file offset at which their data starts."""
    file_bytes = os.fstat(descriptor).st_size
    if file_bytes <= _LENGTH_BYTES:
        raise SafetensorsError(f"{path}: {file_bytes} bytes are too few for a safetensors file")
    (header_bytes,) = struct.unpack("<Q", os.pread(descriptor, _LENGTH_BYTES, 0))
    data_start = _LENGTH_BYTES + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or data_start > file_bytes:
        raise SafetensorsError(
            f"{path}: header ends at byte {data_start}, but the file has {file_bytes} bytes"
            f"{_likely_cause(os.pread(descriptor, 64, 0))}"
        )
    try:
        header = json.loads(
            os.pread(descriptor, header_bytes, _LENGTH_BYTES).decode("utf-8"),
            object_pairs_hook=_unique_keys,
        )
        entries = _parse_entries(header)
        data_bytes = _check_tiling(entries)
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(f"{path}: header: {error}") from None
    if data_start + data_bytes != file_bytes:
        raise SafetensorsError(
            f"{path}: the file has {file_bytes} bytes, its header accounts for"
            f" {data_start + data_bytes}"
        )
    return entries, data_start


def _likely_cause(start: bytes) -> str:
    """Name the usual things that end up under the name of a weight file."""
    if start.startswith(b"version https://git-lfs"):
        return " (it is a Git LFS pointer, not the file it points to)"
    if start.lstrip().startswith(b"<"):
        return " (it is an HTML or XML page)"
    return ""


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    items: dict[str, Any] = {}
    for key, value in pairs:
        if key in items:
            raise ValueError(f"{key!r} appears twice")
        items[key] = value
    return items


def _parse_entries(header: object) -> dict[str, TensorEntry]:
    if not isinstance(header, dict):
        raise ValueError("not a JSON object")
    entries = {
        name: _parse_entry(name, value) for name, value in header.items() if name != "__metadata__"
    }
    if not entries:
        raise ValueError("no tensors")
    return entries


def _parse_entry(name: str, value: object) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name}: expected dtype, shape and data_offsets")
    dtype = _DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise ValueError(
            f"{name}: dtype {value['dtype']!r} is not supported (supported: {', '.join(_DTYPES)})"
        )
    shape = _naturals(name, "shape", value["shape"])
    offsets = _naturals(name, "data_offsets", value["data_offsets"])
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{name}: {len(shape)} dimensions are too many")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name}: data_offsets {list(offsets)} are no range")
    num_bytes = math.prod(shape) * _ARRAY_DTYPES[dtype].itemsize
    if num_bytes != offsets[1] - offsets[0]:
        raise ValueError(
            f"{name}: shape {list(shape)} takes {num_bytes} bytes,"
            f" data_offsets give {offsets[1] - offsets[0]}"
        )
    return TensorEntry(dtype, shape, *offsets)


def _naturals(name: str, key: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        type(number) is int and 0 <= number <= _MAX_OFFSET for number in value
    ):
        raise ValueError(f"{name}: {key} is not a list of natural numbers")
    return tuple(value)


def _check_tiling(entries: Mapping[str, TensorEntry]) -> int:
    """Return the bytes of data, which the tensors cover without holes or overlaps."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            fault = (
                "overlaps the tensor before it" if entry.begin < end else "leaves a hole before it"
            )
            raise ValueError(f"{name}: starts at byte {entry.begin}, not {end}: it {fault}")
        end = entry.end
    return end
