"""The disk tier's index: which file has which block, and which files go when it is full."""

import logging
import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from kv_transfer_svc.tiers import block_file
from kv_transfer_svc.tiers.block_file import BlockFile, DamagedFile
from mesh import metrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """Where a block is."""

    file: BlockFile
    index: int


class DiskStore:
    """Files in one folder, at most `max_bytes`; those least recently used go first.

    The folder outlives the process. Nobody else writes to it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._files: OrderedDict[Path, BlockFile] = OrderedDict()
        self._blocks: dict[bytes, DiskBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def open(self) -> list[BlockFile]:
        """Take over what an earlier process left; what is damaged is deleted and counted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(f"*{block_file.TEMPORARY_SUFFIX}"):
            _delete(path)
        by_age = sorted(
            self.folder.glob(f"*{block_file.SUFFIX}"), key=lambda path: path.stat().st_mtime_ns
        )
        for path in by_age:
            try:
                self.add(block_file.read_header(path))
            except DamagedFile as error:
                report_damage(error)
                _delete(path)
        return list(self._files.values())

    def latest(self, max_bytes: int) -> list[BlockFile]:
        """The files used last, latest first, as many as have no more than `max_bytes` together."""
        latest: list[BlockFile] = []
        for file in reversed(self._files.values()):
            max_bytes -= file.num_bytes
            if max_bytes < 0:
                break
            latest.append(file)
        return latest

    def find(self, key: bytes) -> DiskBlock | None:
        """Where a block is; its file is now the most recently used one."""
        found = self._blocks.get(key)
        if found is not None:
            self._files.move_to_end(found.file.path)
        return found

    def touch(self, file: BlockFile) -> None:
        """Let the file's use be known to a later process; blocks for a system call."""
        try:
            os.utime(file.path)
        except OSError as error:
            logger.debug("use not recorded", extra={"reason": str(error)})

    def add(self, file: BlockFile) -> list[BlockFile]:
        """Count a file that has been written; returns those that had to go for it."""
        removed = self.discard(file.path)
        self._files[file.path] = file
        self.num_bytes += file.num_bytes
        for index, key in enumerate(file.keys):
            self._blocks[key] = DiskBlock(file, index)
        while self.num_bytes > self.max_bytes and self._files:
            removed += self.drop(next(iter(self._files)))
        return removed

    def drop(self, path: Path) -> list[BlockFile]:
        """Forget a file and delete it; returns it if it was known."""
        _delete(path)
        return self.discard(path)

    def discard(self, path: Path) -> list[BlockFile]:
        """Forget a file; returns it if it was known."""
        file = self._files.pop(path, None)
        if file is None:
            return []
        self.num_bytes -= file.num_bytes
        for key in file.keys:
            # Another file may have the key too, by now.
            found = self._blocks.get(key)
            if found is not None and found.file is file:
                del self._blocks[key]
        return [file]


def _delete(path: Path) -> None:
    """One that cannot be deleted takes up room and nothing else: nobody knows it any more."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("a file of the disk tier stays", extra={"reason": str(error)})


def report_damage(error: DamagedFile) -> None:
    metrics.KV_TIER_DAMAGED.add(1)
    logger.warning("a file of the disk tier is damaged", extra={"reason": str(error)})
