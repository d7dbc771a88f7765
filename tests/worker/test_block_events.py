"""When those who are interested hear of blocks."""

import asyncio

from engine.block_pool import BlockEvents
from worker.block_events import BlockEventRelay

FILLED = BlockEvents(stored=[b"one"])
EVICTED = BlockEvents(removed=[b"one"])


async def test_filled_blocks_are_told_of_behind_what_the_event_loop_has_to_do() -> None:
    told: list[BlockEvents] = []
    relay = BlockEventRelay()
    relay.add(told.append)

    relay.offer(FILLED)
    for _ in range(5):
        await asyncio.sleep(0)
    assert told == []

    async with asyncio.timeout(20):
        while not told:  # noqa: ASYNC110 - the relay tells listeners only
            await asyncio.sleep(0.001)
    assert told == [FILLED]


async def test_evictions_are_told_at_once_behind_what_came_before() -> None:
    first: list[BlockEvents] = []
    second: list[BlockEvents] = []
    relay = BlockEventRelay()
    relay.add(first.append)
    relay.add(second.append)

    relay.offer(FILLED)
    relay.offer(EVICTED)

    assert first == second == [FILLED, EVICTED]
