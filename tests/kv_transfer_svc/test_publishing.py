"""What the block index is told about the colder tiers."""

import asyncio
from collections.abc import Sequence

from kv_transfer_svc.tiers.publishing import TierPublishers
from mesh.block_index import Tier, machine_holder_id

KEY, OTHER = b"k" * 16, b"l" * 16


class PaperIndex:
    """Keys by model, holder, incarnation and tier."""

    def __init__(self) -> None:
        self.shelves: dict[tuple[str, str, str, Tier], set[bytes]] = {}
        self.changed = asyncio.Event()
        self._seqs: dict[tuple[str, str, str, Tier], int] = {}

    async def publish(
        self,
        model: str,
        worker_id: str,
        incarnation: str,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        tier: Tier,
    ) -> int:
        shelf = (model, worker_id, incarnation, tier)
        keys = self.shelves.setdefault(shelf, set())
        keys.difference_update(removed)
        keys.update(stored)
        self._seqs[shelf] = self._seqs.get(shelf, 0) + 1
        self.changed.set()
        return self._seqs[shelf]

    async def renew(self, model: str, worker_id: str, incarnation: str, tier: Tier) -> int:
        return self._seqs.get((model, worker_id, incarnation, tier), 0)

    async def drop_worker(self, model: str, worker_id: str, incarnation: str, tier: Tier) -> None:
        self.shelves.pop((model, worker_id, incarnation, tier), None)

    async def until(self, shelf: tuple[str, str, str, Tier], keys: set[bytes]) -> None:
        async with asyncio.timeout(20):
            while self.shelves.get(shelf) != keys:
                self.changed.clear()
                await self.changed.wait()


async def test_machine_is_the_holder_under_the_address_that_workers_know() -> None:
    index = PaperIndex()
    async with TierPublishers(index, "i1") as publishers:
        # A disk tier that survived is known before the server listens.
        publishers.on_change("m", "disk", [KEY, OTHER], ())
        publishers.begin("10.0.0.1:50060")
        publishers.on_change("m", "host", [KEY], ())

        holder_id = machine_holder_id("10.0.0.1:50060")
        await index.until(("m", holder_id, "i1", "disk"), {KEY, OTHER})
        await index.until(("m", holder_id, "i1", "host"), {KEY})
        publishers.on_change("m", "disk", (), [OTHER])
        await index.until(("m", holder_id, "i1", "disk"), {KEY})

    assert index.shelves == {}
