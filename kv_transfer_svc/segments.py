"""Engines' shared-memory segments: mapped while attached, and for as long as a copy uses them."""

import logging
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.block_marks import BlockMarks
from kv_transfer_svc.fill_marks import FillMarks
from mesh.errors import InvalidRequest, KvTransferFailed

logger = logging.getLogger(__name__)

# Linux 5.14; absent from the mmap module of Python 3.11.
_MADV_POPULATE_READ = 22
_GENERATION = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """What an engine says of its segment. Blocks lie one after another from the file's start."""

    engine_id: str
    path: str
    block_bytes: int
    num_blocks: int
    layout_fingerprint: str
    # None: the engine does not count what its blocks contain.
    generations_offset: int | None = None
    # What the fingerprint stands for, for messages.
    layout: Mapping[str, str] = field(default_factory=dict)
    # The engine tells which blocks are filled.
    has_marks: bool = False

    @property
    def num_bytes(self) -> int:
        """Of the blocks alone."""
        return self.block_bytes * self.num_blocks

    @property
    def file_bytes(self) -> int:
        if self.generations_offset is None:
            return self.num_bytes
        if self.has_marks:
            return self.generations_offset + BlockMarks.num_bytes(self.num_blocks)
        return self.generations_offset + self.num_blocks * _GENERATION.itemsize


class Segment:
    """One mapped segment. It is unmapped with the last of its users."""

    def __init__(self, spec: SegmentSpec) -> None:
        """Raises InvalidRequest if the file is missing or smaller than announced."""
        self.spec = spec
        self._file = _open(spec)
        try:
            self._map = mmap.mmap(self._file, spec.file_bytes)
        except BaseException:
            os.close(self._file)
            raise
        blocks = np.frombuffer(self._map, dtype=np.uint8, count=spec.num_bytes)
        self._blocks: NDArray[np.uint8] | None = blocks.reshape(spec.num_blocks, spec.block_bytes)
        self._generations: NDArray[np.uint32] | None = None
        # None: the engine does not tell which blocks are filled.
        self.fill_marks: FillMarks | None = None
        if spec.generations_offset is not None:
            self._generations = np.frombuffer(
                self._map, _GENERATION, spec.num_blocks, spec.generations_offset
            )
            if spec.has_marks:
                marks = BlockMarks(self._map, spec.num_blocks, spec.generations_offset)
                self.fill_marks = FillMarks(marks)
        # Not any more: the engine is gone, and what it was filling stays as it is.
        self.is_attached = True
        self._is_resident = np.zeros(spec.num_blocks, dtype=np.bool_)
        # Also used from the threads that serve other machines.
        self._lock = threading.Lock()
        self._num_users = 1

    @property
    def blocks(self) -> NDArray[np.uint8]:
        """`[num_blocks, block_bytes]`, over the shared memory itself. Keep no view of it beyond
        the use of the segment: the mapping could not be closed."""
        assert self._blocks is not None, "segment is unmapped"
        return self._blocks

    @property
    def address(self) -> int:
        """Where the segment begins in this process's memory, while it is mapped."""
        return int(self.blocks.ctypes.data)

    def bytes_of(self, blocks: slice) -> memoryview:
        """The bytes of neighbouring blocks, in place."""
        return self.blocks[blocks].data.cast("B")

    @property
    def is_mapped(self) -> bool:
        return self._blocks is not None

    def acquire(self) -> None:
        with self._lock:
            assert self._num_users > 0, "segment is unmapped"
            self._num_users += 1

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            is_last = self._num_users == 0
        if is_last:
            # The views go before the mapping that they point into.
            self._blocks = None
            self._generations = None
            self.fill_marks = None
            try:
                self._map.close()
            except BufferError:
                # The error of a failed copy still refers to a view; the mapping goes with it.
                logger.debug("mapping is closed later", extra={"engine_id": self.spec.engine_id})
            os.close(self._file)

    def check_size(self) -> None:
        """A file that was cut short since it was mapped would end this process by SIGBUS."""
        if os.fstat(self._file).st_size < self.spec.file_bytes:
            raise KvTransferFailed(f"the segment of engine {self.spec.engine_id!r} was truncated")

    def check_generations(
        self, block_ids: NDArray[np.int64], generations: NDArray[np.uint32]
    ) -> None:
        """Raise KvTransferFailed if a block has got new content since it had its generation.

        Asked before and after a copy, it tells that the copy is of what was meant. Without
        generations, nothing is checked.
        """
        if not len(generations):
            return
        if len(generations) != len(block_ids):
            raise InvalidRequest(f"{len(generations)} generations for {len(block_ids)} blocks")
        if self._generations is None:
            raise InvalidRequest(f"engine {self.spec.engine_id!r} keeps no generations")
        changed = np.flatnonzero(self._generations[block_ids] != generations)
        if len(changed):
            raise KvTransferFailed(
                f"engine {self.spec.engine_id!r} has reused {len(changed)} of the blocks"
            )

    def make_resident(self, first_block: int, num_blocks: int) -> None:
        """Map the pages of a run at once, the first time that it is used.

        Left to page faults, a first copy runs at a third of the speed; mapping everything when
        the engine attaches would count the whole segment as this process's memory. Pages of
        shared memory that are there are mapped many at a time when it is for reading, and can be
        written to then; for writing they are mapped one by one.
        """
        run = slice(first_block, first_block + num_blocks)
        if self._is_resident[run].all():
            return
        start = first_block * self.spec.block_bytes
        end = start + num_blocks * self.spec.block_bytes
        start -= start % mmap.PAGESIZE
        try:
            self._map.madvise(_MADV_POPULATE_READ, start, end - start)
        except OSError:
            # An older kernel: the copy takes the faults.
            logger.debug("cannot populate pages", exc_info=True)
        self._is_resident[run] = True


class SegmentTable:
    """The segments attached now, by engine id."""

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}
        # A segment that is found is acquired before its engine can let go of it.
        self._lock = threading.Lock()
        self._on_detach: Callable[[str], None] = lambda engine_id: None

    def on_detach(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the id of an engine that is not attached any more."""
        self._on_detach = listener

    def __len__(self) -> int:
        return len(self._segments)

    @contextmanager
    def attached(self, spec: SegmentSpec) -> Iterator[Segment]:
        """Keep a segment known for the block.

        An engine that attaches again takes the place of its earlier call, which may not have
        been noticed to be broken yet.
        """
        segment = Segment(spec)
        with self._lock:
            self._segments[spec.engine_id] = segment
        try:
            yield segment
        finally:
            with self._lock:
                segment.is_attached = False
                is_gone = self._segments.get(spec.engine_id) is segment
                if is_gone:
                    del self._segments[spec.engine_id]
            if is_gone:
                self._on_detach(spec.engine_id)
            segment.release()

    def knows(self, engine_id: str) -> bool:
        return engine_id in self._segments

    @contextmanager
    def in_use(self, *engine_ids: str) -> Iterator[tuple[Segment, ...]]:
        """The engines' segments, which stay mapped for the block, attached or not.

        Raises KvTransferFailed if one is not attached.
        """
        with ExitStack() as users:
            with self._lock:
                segments = tuple(self._get(engine_id) for engine_id in engine_ids)
                for segment in segments:
                    segment.acquire()
                    users.callback(segment.release)
            yield segments

    def _get(self, engine_id: str) -> Segment:
        segment = self._segments.get(engine_id)
        if segment is None:
            raise KvTransferFailed(f"engine {engine_id!r} is not attached here")
        return segment


def _open(spec: SegmentSpec) -> int:
    """A descriptor of the segment's file, after checks."""
    if not spec.engine_id:
        raise InvalidRequest("engine_id is empty", param="engine_id")
    if spec.block_bytes == 0 or spec.num_blocks == 0:
        raise InvalidRequest("a segment has at least one block of at least one byte")
    offset = spec.generations_offset
    if offset is not None and (offset < spec.num_bytes or offset % _GENERATION.itemsize):
        raise InvalidRequest(f"generations cannot begin at byte {offset}")
    if offset is None and spec.has_marks:
        raise InvalidRequest("marks lie behind generations, and it has none")
    try:
        file = os.open(spec.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot open segment {spec.path!r}: {error}", param="path") from error
    status = os.fstat(file)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = "is not a file"
    elif status.st_size < spec.file_bytes:
        problem = (
            f"has {status.st_size} bytes, fewer than {spec.num_blocks} blocks of "
            f"{spec.block_bytes} bytes"
        )
    if problem is not None:
        os.close(file)
        raise InvalidRequest(f"segment {spec.path!r} {problem}", param="path")
    return file
