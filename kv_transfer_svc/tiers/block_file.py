"""One file of the disk tier: a group of blocks, their keys and checksums, written as a whole.

    "PDMKVBLK" | version u32 | header length u32 | xxh3-64 of the header u64 | header, JSON
    | padding to a page | the blocks, one after another

A file has its name only once all of it is on disk, so what has a name was complete. What time
or hardware did to it since is found by the checksums, the header's and each block's.
"""

import json
import os
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from kv_transfer_svc.tiers.host_pool import TierBlock

SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"

_MAGIC = b"PDMKVBLK"
_VERSION = 1
_PREFIX = struct.Struct("<8sIIQ")
_PAGE = 4096
_MAX_HEADER_BYTES = 16 << 20


class DamagedFile(Exception):
    """A file, or a block in it, is not what was written."""


@dataclass(frozen=True)
class BlockFile:
    """What a file says of itself."""

    path: Path
    model: str
    layout_fingerprint: str
    block_bytes: int
    keys: tuple[bytes, ...]
    checksums: tuple[int, ...]
    payload_offset: int

    @property
    def num_bytes(self) -> int:
        return self.payload_offset + len(self.keys) * self.block_bytes


class BlockReader:
    """A file that is open while blocks are read from it, inside its block."""

    def __init__(self, file: BlockFile) -> None:
        """Raises DamagedFile."""
        self.file = file
        try:
            self._descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DamagedFile(f"{file.path.name}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._descriptor)

    def read(self, index: int, destination: memoryview) -> None:
        """Fill `destination`; raises DamagedFile, whatever has been written by then."""
        file = self.file
        offset = file.payload_offset + index * file.block_bytes
        try:
            num_bytes = _read_into(self._descriptor, destination, offset)
        except OSError as error:
            raise DamagedFile(f"{file.path.name}: {error}") from error
        if num_bytes != len(destination):
            raise DamagedFile(f"{file.path.name} ends after {num_bytes} bytes of block {index}")
        # While the block is in the processor's cache.
        if xxhash.xxh3_64_intdigest(destination) != file.checksums[index]:
            raise DamagedFile(f"{file.path.name}: block {index} has another checksum")


def read_ahead(file: BlockFile) -> None:
    """Have the system read a file into its page cache; what cannot be read shows in its use."""
    with suppress(OSError), file.path.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def write(folder: Path, blocks: Sequence[TierBlock]) -> BlockFile:
    """Make a file of blocks of one model and layout; raises OSError and leaves nothing then."""
    first = blocks[0]
    checksums = tuple(xxhash.xxh3_64_intdigest(block.data.data) for block in blocks)
    header = json.dumps(
        {
            "model": first.model,
            "layout_fingerprint": first.layout_fingerprint,
            "block_bytes": first.data.nbytes,
            "keys": [block.key.hex() for block in blocks],
            "checksums": checksums,
        }
    ).encode()
    prefix = _PREFIX.pack(_MAGIC, _VERSION, len(header), xxhash.xxh3_64_intdigest(header))
    offset = -(-(len(prefix) + len(header)) // _PAGE) * _PAGE
    descriptor, temporary = tempfile.mkstemp(TEMPORARY_SUFFIX, dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write((prefix + header).ljust(offset, b"\0"))
            for block in blocks:
                file.write(block.data.data)
            file.flush()
            os.fsync(file.fileno())
            # Seldom read, and never soon: its pages serve the next file rather than be made anew.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        path = folder / f"{first.key.hex()}-{checksums[0]:016x}{SUFFIX}"
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    _sync_folder(folder)
    return BlockFile(
        path,
        first.model,
        first.layout_fingerprint,
        first.data.nbytes,
        tuple(block.key for block in blocks),
        checksums,
        offset,
    )


def read_header(path: Path) -> BlockFile:
    """What a file holds, without its blocks; raises DamagedFile."""
    try:
        with path.open("rb") as file:
            prefix = file.read(_PREFIX.size)
            if len(prefix) < _PREFIX.size:
                raise DamagedFile(f"{path.name} is cut short")
            magic, version, length, checksum = _PREFIX.unpack(prefix)
            if (magic, version) != (_MAGIC, _VERSION) or length > _MAX_HEADER_BYTES:
                raise DamagedFile(f"{path.name} is not a file of version {_VERSION}")
            header = file.read(length)
            num_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DamagedFile(f"{path.name}: {error}") from error
    if len(header) < length or xxhash.xxh3_64_intdigest(header) != checksum:
        raise DamagedFile(f"{path.name}: the header has another checksum")
    fields = json.loads(header)
    file_ = BlockFile(
        path,
        fields["model"],
        fields["layout_fingerprint"],
        fields["block_bytes"],
        tuple(bytes.fromhex(key) for key in fields["keys"]),
        tuple(fields["checksums"]),
        -(-(_PREFIX.size + length) // _PAGE) * _PAGE,
    )
    if num_bytes != file_.num_bytes:
        raise DamagedFile(f"{path.name} has {num_bytes} bytes instead of {file_.num_bytes}")
    return file_


def _read_into(descriptor: int, destination: memoryview, offset: int) -> int:
    total = 0
    while total < len(destination):
        num_bytes = os.preadv(descriptor, [destination[total:]], offset + total)
        if num_bytes == 0:
            break
        total += num_bytes
    return total


def _sync_folder(folder: Path) -> None:
    """A new name is on disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
