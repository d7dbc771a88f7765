"""The paged KV cache: one contiguous byte range per block, in memory that others can map."""

import fcntl
import math
import mmap
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class KvSegmentError(Exception):
    """The shared-memory segment cannot be made; the message names its path."""


@dataclass(frozen=True)
class KvCacheLayout:
    """How a block of keys and values lies in memory."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Layer, key or value, head, token, element."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, keys and values."""
        return math.prod(self.block_shape) * self.dtype.itemsize

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
            "dtype": str(self.dtype).removeprefix("torch."),
            "order": "layer,kv,head,token",
        }


class KvCache:
    """The blocks' memory: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.

    With a path, that is a file (in /dev/shm) that a transfer agent can map; this
    object owns the file and holds its lock for as long as it lives. Behind the blocks the
    file has their `generations`, by which the agent sees that one got new content.
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
        if path is not None and torch.device(device).type != "cpu":
            raise KvSegmentError(f"{path}: a segment needs the CPU, the engine runs on {device}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.path = path
        self.generations: array[int] | memoryview[int] = array("I")
        self._release: Callable[[], None] = lambda: None
        shape = (num_blocks, *layout.block_shape)
        if torch.device(device).type == "cpu":
            memory = self._map(num_blocks * layout.block_bytes)
            self.tensor = torch.frombuffer(memory, dtype=layout.dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=layout.dtype, device=device)
        if not self.generations:
            self.generations = array("I", bytes(4 * num_blocks))

    @property
    def rows(self) -> Tensor:
        """The same memory as `[rows, head_dim]`: one head's key or value of one token each."""
        return self.tensor.view(-1, self.layout.head_dim)

    def close(self) -> None:
        """Unlink the file. The memory goes when the last tensor over it does."""
        self._release()
        self._release = lambda: None
        self.tensor = torch.empty(0, dtype=self.layout.dtype)

    def _map(self, num_bytes: int) -> mmap.mmap:
        # Every page is touched here: the first touch of shared memory costs ten times a write.
        if self.path is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            return mmap.mmap(-1, num_bytes, flags=flags)
        offset = self.layout.generations_offset(self.num_blocks)
        generations_bytes = self.num_blocks * array("I").itemsize
        descriptor = _create_segment(self.path, offset + generations_bytes)
        self._release = lambda: _remove_segment(descriptor, self.path)
        # A mapping of its own: whoever keeps the generations does not keep the blocks.
        self.generations = memoryview(mmap.mmap(descriptor, generations_bytes, offset=offset)).cast(
            "I"
        )
        return mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


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
