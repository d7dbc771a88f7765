"""Tells the block index what the colder tiers of this machine hold."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

from mesh.block_index import Tier, machine_holder_id
from mesh.block_publisher import BlockPublisher, Index


@dataclass(frozen=True)
class KeyChanges:
    """Keys that a tier gained and lost."""

    stored: Sequence[bytes]
    removed: Sequence[bytes]


class TierPublishers:
    """A publisher for each model and tier, started with its first key, ended with the block.

    The holder is the machine: every worker on it can load these blocks.
    """

    def __init__(self, index: Index, incarnation: str) -> None:
        self._index = index
        self._incarnation = incarnation
        self._publishers: dict[tuple[str, Tier], BlockPublisher] = {}
        self._address = ""
        self._stack = AsyncExitStack()
        self._starting: set[asyncio.Task[BlockPublisher]] = set()
        # What changed before the address was known.
        self._early: list[tuple[str, Tier, KeyChanges]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._starting:
            await asyncio.wait(self._starting)
        await self._stack.aclose()

    def begin(self, transfer_address: str) -> None:
        """Publish under this address from now on: it is the one that workers know."""
        self._address = transfer_address
        early, self._early = self._early, []
        for model, tier, changes in early:
            self._publish(model, tier, changes)

    def on_change(
        self, model: str, tier: Tier, stored: Sequence[bytes], removed: Sequence[bytes]
    ) -> None:
        changes = KeyChanges(stored, removed)
        if self._address:
            self._publish(model, tier, changes)
        else:
            self._early.append((model, tier, changes))

    def _publish(self, model: str, tier: Tier, changes: KeyChanges) -> None:
        publisher = self._publishers.get((model, tier))
        if publisher is None:
            holder_id = machine_holder_id(self._address)
            publisher = BlockPublisher(self._index, model, holder_id, self._incarnation, tier=tier)
            self._publishers[model, tier] = publisher
            starting = asyncio.create_task(self._stack.enter_async_context(publisher))
            self._starting.add(starting)
            starting.add_done_callback(self._starting.discard)
        publisher.offer(changes)
