"""Brings blocks to disk behind everybody's back: in groups, and dropped rather than waited for."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kv_transfer_svc.tiers import block_file
from kv_transfer_svc.tiers.disk_store import DiskStore
from kv_transfer_svc.tiers.host_pool import TierBlock
from mesh import metrics
from mesh.block_index import Tier

logger = logging.getLogger(__name__)

_GROUP_BYTES = 8 << 20
_MAX_WAITING_BYTES = 128 << 20
# How long a group that is not full waits for more.
_LINGER_S = 0.2
_RETRY_DELAY_S = 1.0

OnChange = Callable[[str, Tier, Sequence[bytes], Sequence[bytes]], None]


class DiskWriter:
    """Owns the blocks that wait for the disk. There are never more than memory allows."""

    def __init__(self, disk: DiskStore, on_change: OnChange) -> None:
        self._disk = disk
        self._on_change = on_change
        self._waiting: OrderedDict[bytes, TierBlock] = OrderedDict()
        self._num_bytes = 0
        self._offered = asyncio.Event()
        self._is_hurried = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting

    async def start(self) -> None:
        self._task = asyncio.create_task(self._write_for_ever())

    async def stop(self) -> None:
        """What still waits is lost: whoever wants it calls `flush` before."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def flush(self) -> None:
        self._is_hurried.set()
        await self._idle.wait()
        self._is_hurried.clear()

    def offer(self, blocks: Sequence[TierBlock]) -> None:
        """Write blocks some time soon, unless too much waits already."""
        for block in blocks:
            if block.key in self._disk or block.key in self._waiting:
                continue
            if self._num_bytes + block.data.nbytes > _MAX_WAITING_BYTES:
                metrics.KV_TIER_SKIPPED.add(1, {"tier": "disk"})
                continue
            self._waiting[block.key] = block
            self._num_bytes += block.data.nbytes
            self._idle.clear()
            self._offered.set()

    async def _write_for_ever(self) -> None:
        while True:
            if not self._waiting:
                self._idle.set()
                self._offered.clear()
                await self._offered.wait()
            await self._linger()
            await self._write(self._next_group())

    async def _linger(self) -> None:
        if self._num_bytes < _GROUP_BYTES:
            try:
                async with asyncio.timeout(_LINGER_S):
                    await self._is_hurried.wait()
            except TimeoutError:
                return

    def _next_group(self) -> list[TierBlock]:
        """The blocks that have waited longest, as far as one file can hold them."""
        group: list[TierBlock] = []
        num_bytes = 0
        for block in self._waiting.values():
            first = group[0] if group else block
            if (block.model, block.layout_fingerprint) != (first.model, first.layout_fingerprint):
                continue
            if group and num_bytes + block.data.nbytes > _GROUP_BYTES:
                break
            group.append(block)
            num_bytes += block.data.nbytes
        return group

    async def _write(self, group: list[TierBlock]) -> None:
        try:
            file = await asyncio.to_thread(block_file.write, self._disk.folder, group)
        except OSError as error:
            # A full or broken disk costs the tier, nothing else.
            logger.warning("blocks not written to disk", extra={"reason": str(error)})
            metrics.KV_TIER_SKIPPED.add(len(group), {"tier": "disk"})
            await asyncio.sleep(_RETRY_DELAY_S)
        else:
            metrics.KV_TIER_STORED.add(len(group), {"tier": "disk"})
            self._on_change(file.model, "disk", file.keys, ())
            for old in self._disk.add(file):
                self._on_change(old.model, "disk", (), old.keys)
        finally:
            for block in group:
                del self._waiting[block.key]
                self._num_bytes -= block.data.nbytes
