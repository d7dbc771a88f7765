"""The ctypes door to the compiled kernels: structures, signatures, status checks."""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.kernels.build import ensure_library
from engine.kernels.formats import KvFormat, WeightFormat
from engine.kernels.pack import ALIGNMENT, PackedMatrix

Array = npt.NDArray[Any]

ABI_VERSION = 3


class KernelError(Exception):
    """A call that the kernels refused; the message says why."""


class LinearStruct(ctypes.Structure):
    _fields_ = (
        ("format", c_int32),
        ("reserved", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("data", c_void_p),
        ("scales", c_void_p),
    )


class LayerStruct(ctypes.Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("qkv", LinearStruct),
        ("output", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
    )


class ConfigStruct(ctypes.Structure):
    _fields_ = (
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("intermediate_size", c_int64),
        ("vocab_size", c_int64),
        ("max_positions", c_int64),
        ("block_size", c_int64),
        ("rms_norm_eps", c_float),
        ("kv_format", c_int32),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("embedding", LinearStruct),
        ("final_norm", c_void_p),
        ("head", LinearStruct),
        ("layers", POINTER(LayerStruct)),
        ("level", c_char_p),
        ("num_threads", c_int32),
        ("reserved", c_int32),
    )


class BatchStruct(ctypes.Structure):
    _fields_ = (
        ("num_rows", c_int64),
        ("num_seqs", c_int64),
        ("num_logits", c_int64),
        ("max_blocks", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("query_starts", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("logits_rows", c_void_p),
        ("kv_cache", c_void_p),
        ("num_blocks", c_int64),
        ("logits", c_void_p),
        ("first_layer", c_int64),
        ("end_layer", c_int64),
        ("hidden", c_void_p),
    )


# The rows of pdmesh_sampling, as an array that is filled column by column.
SAMPLING_DTYPE = np.dtype(
    [
        ("seed", np.int64),
        ("position", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
    ]
)

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "pdmesh_abi_version": (c_int32, []),
    "pdmesh_level": (c_char_p, [c_char_p]),
    "pdmesh_status_text": (c_char_p, [c_int32]),
    "pdmesh_unit_bytes": (c_int64, [c_int32, c_int64]),
    "pdmesh_block_bytes": (c_int64, [c_int32] + [c_int64] * 4),
    "pdmesh_model_create": (c_void_p, [POINTER(ConfigStruct), POINTER(c_int32)]),
    "pdmesh_model_destroy": (None, [c_void_p]),
    "pdmesh_model_forward": (c_int32, [c_void_p, POINTER(BatchStruct)]),
    "pdmesh_model_sample": (c_int32, [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "pdmesh_linear_forward": (
        c_int32,
        [
            c_char_p,
            POINTER(LinearStruct),
            c_void_p,
            c_int64,
            c_int64,
            c_void_p,
            c_int64,
            c_int32,
            c_int32,
        ],
    ),
    "pdmesh_rms_norm": (c_int32, [c_char_p, c_void_p, c_void_p, c_float, c_int64, c_void_p]),
    "pdmesh_exp": (c_int32, [c_char_p, c_void_p, c_int64, c_void_p]),
    "pdmesh_write_kv": (c_int32, [c_char_p, c_int32, c_int64, c_void_p, c_void_p, c_void_p]),
    "pdmesh_read_seconds": (c_double, [c_void_p, c_int64, c_int32]),
    "pdmesh_dot_gops": (c_double, [c_char_p]),
}


class Library:
    """The loaded library. Every call through it releases the GIL."""

    def __init__(self, path: str) -> None:
        self.functions = ctypes.CDLL(path)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.functions, name)
            function.restype = result
            function.argtypes = arguments
        if self.functions.pdmesh_abi_version() != ABI_VERSION:
            raise KernelError(f"{path} has another interface version")

    def level(self, name: str | None = None) -> str | None:
        """The instruction-set level in use, or the named one if this machine can run it."""
        level = self.functions.pdmesh_level(name.encode() if name else None)
        return None if level is None else str(level.decode())

    def levels(self) -> list[str]:
        """Every level that this machine can run, best first."""
        return [name for name in ("amx", "avx512", "avx2", "portable") if self.level(name)]

    def check(self, status: int) -> None:
        if status:
            raise KernelError(self.functions.pdmesh_status_text(status).decode())

    def block_bytes(
        self,
        kv_format: KvFormat,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> int:
        """Bytes of one KV block, scales included."""
        return int(
            self.functions.pdmesh_block_bytes(
                kv_format, num_layers, num_kv_heads, head_dim, block_size
            )
        )

    def linear(
        self, weights: PackedMatrix, x: Array, *, level: str | None = None, num_threads: int = 1
    ) -> Array:
        """`x` times the matrix; rows of `x` may be strided, their elements not."""
        if x.dtype != np.float32 or x.shape[1] != weights.k or x.strides[1] != 4:
            raise ValueError("x must be float32 with contiguous rows as long as the matrix is wide")
        out = np.empty((len(x), weights.n), dtype=np.float32)
        arguments = (linear_struct(weights), address(x), len(x), x.strides[0] // 4, address(out))
        name = level.encode() if level else None
        function = self.functions.pdmesh_linear_forward
        self.check(function(name, *arguments, weights.n, num_threads, 1))
        return out


@lru_cache(maxsize=1)
def load_library() -> Library | None:
    """The library, or None (after one warning) where it cannot be built."""
    path = ensure_library()
    return None if path is None else Library(str(path))


def address(array: Array) -> int:
    return int(array.ctypes.data)


def linear_struct(matrix: PackedMatrix) -> LinearStruct:
    """Refers to the matrix's memory, which the caller keeps."""
    if address(matrix.data) % ALIGNMENT and matrix.format is not WeightFormat.FLOAT32:
        # Correct, but every second load would cross a cache line.
        raise ValueError("packed weights are not aligned; put them in an Arena")
    scales = None if matrix.scales is None else address(matrix.scales)
    return LinearStruct(matrix.format, 0, matrix.n, matrix.k, address(matrix.data), scales)
