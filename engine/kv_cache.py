"""The paged KV cache: one contiguous byte range per block, in memory that others can map."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.block_marks import BlockMarks
from engine.config import KvDtypeName

if TYPE_CHECKING:
    from torch import Tensor

_ELEMENT_BYTES: dict[KvDtypeName, int] = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}
# In the 8-bit formats, each key and value of a token and head has a float32 scale.
_SCALE_BYTES: dict[KvDtypeName, int] = {"float32": 0, "bfloat16": 0, "int8": 4, "fp8": 4}


class KvSegmentError(Exception):
    """The shared-memory segment cannot be made; the message names its path."""


@dataclass(frozen=True)
class KvCacheLayout:
    """How a block of keys and values lies in memory: all elements, then all scales."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: KvDtypeName
    # What the keys and values are computed with.
    weights: str = "float32"

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Layer, key or value, head, token, element."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, keys and values."""
        num_rows = math.prod(self.block_shape) // self.head_dim
        row_bytes = self.head_dim * _ELEMENT_BYTES[self.dtype] + _SCALE_BYTES[self.dtype]
        return num_rows * row_bytes

    def generations_offset(self, num_blocks: int) -> int:
        """Where in a segment's file the generations are: on the first page after the blocks."""
        return -(-num_blocks * self.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def fields(self) -> dict[str, str | int]:
        """What two engines must agree on to exchange blocks."""
        return {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "block_size": self.block_size,
            "dtype": self.dtype,
            "weights": self.weights,
            "order": "layer,kv,head,token",
        }


class KvCache:
    """The blocks' memory, a row of `block_bytes` each.

    With a path, that is a file (in /dev/shm) that a transfer agent can map; this
    object owns the file and holds its lock for as long as it lives. Behind the blocks the
    file has their marks, by which the agent sees that one got new content or is filled.
    """

    def __init__(
        self,
        layout: KvCacheLayout,
        num_blocks: int,
        path: str | None = None,
        device: str = "cpu",
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, expected at least 1")
        is_on_host = device == "cpu"
        if path is not None and not is_on_host:
            raise KvSegmentError(f"{path}: a segment needs the CPU, the engine runs on {device}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.path = path
        self.marks: BlockMarks
        self._release: Callable[[], None] = lambda: None
        # uint8[num_blocks, block_bytes]; of a cache on another device, without rows.
        self.memory: npt.NDArray[np.uint8] = np.empty((0, layout.block_bytes), dtype=np.uint8)
        self._tensor: Tensor | None = None
        if is_on_host:
            memory = np.frombuffer(self._map(num_blocks * layout.block_bytes), dtype=np.uint8)
            self.memory = memory.reshape(num_blocks, layout.block_bytes)
        else:
            self._tensor = _zeros(layout, num_blocks, device)
            self.marks = BlockMarks.private(num_blocks)

    @property
    def tensor(self) -> Tensor:
        """`[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, the memory as torch
        sees it; torch is loaded here and not before, because it costs 200 MB.
        """
        if self._tensor is None:
            import torch

            elements = torch.from_numpy(self.memory).view(getattr(torch, self.layout.dtype))
            self._tensor = elements.view(len(self.memory), *self.layout.block_shape)
        return self._tensor

    @property
    def rows(self) -> Tensor:
        """The same as `[rows, head_dim]`: one head's key or value of one token each."""
        return self.tensor.view(-1, self.layout.head_dim)

    def close(self) -> None:
        """Unlink the file. The memory goes when the last array over it does."""
        self._release()
        self._release = lambda: None
        self.memory = self.memory[:0].copy()
        self._tensor = None

    def _map(self, num_bytes: int) -> mmap.mmap:
        # Every page is touched here: the first touch of shared memory costs ten times a write.
        if self.path is None:
            self.marks = BlockMarks.private(self.num_blocks)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            return mmap.mmap(-1, num_bytes, flags=flags)
        offset = self.layout.generations_offset(self.num_blocks)
        marks_bytes = BlockMarks.num_bytes(self.num_blocks)
        descriptor = _create_segment(self.path, offset + marks_bytes)
        self._release = lambda: _remove_segment(descriptor, self.path)
        # A mapping of its own: whoever keeps the marks does not keep the blocks.
        self.marks = BlockMarks(mmap.mmap(descriptor, marks_bytes, offset=offset), self.num_blocks)
        return mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _zeros(layout: KvCacheLayout, num_blocks: int, device: str) -> Tensor:
    import torch

    shape = (num_blocks, *layout.block_shape)
    dtype: Any = getattr(torch, layout.dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def _create_segment(path: str, num_bytes: int) -> int:
    """Create the file, locked; one that a dead engine left behind is replaced."""
    try:
        if os.path.exists(path):
            _remove_stale_segment(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KvSegmentError(f"{path}: cannot create the segment: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Reserved now: a page that cannot be had later would be a SIGBUS, not an error.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        _remove_segment(descriptor, path)
        raise KvSegmentError(f"{path}: no room for {num_bytes} bytes: {error}") from error
    return descriptor


def _remove_stale_segment(path: str) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except BlockingIOError:
        raise KvSegmentError(f"{path}: a running engine holds this segment") from None
    finally:
        os.close(descriptor)


def _remove_segment(descriptor: int, path: str | None) -> None:
    if path is not None and os.path.exists(path):
        os.unlink(path)
    os.close(descriptor)
