"""Nobody asks anything for a long time: what Redis keeps for a while only is still there then."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.placement_sim import virtual_time
from engine.block_pool import BlockEvents
from mesh.block_index import DEFAULT_KEEP_S, DEFAULT_LEASE_S, Tier
from mesh.block_publisher import BlockPublisher
from mesh.registry import Heartbeat, WorkerLoad, WorkerRecord
from tests.paper_workers import registered

# Ten minutes and more: until all that Redis knew at their beginning would have ended by itself.
IDLE_S = 1.5 * DEFAULT_KEEP_S
KEYS = [number.to_bytes(16, "big") for number in range(3000)]


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class ForgetfulRedis:
    """What was told to it, and when it will have forgotten that."""

    registered_until: float = 0.0
    lease_until: float = 0.0
    kept_until: dict[bytes, float] = field(default_factory=dict)
    seq: int = 0
    num_calls: int = 0

    async def put(self, record: WorkerRecord, load: WorkerLoad, ttl_s: float) -> bool:
        self.registered_until = now() + ttl_s
        return True

    async def remove(self, worker_id: str, incarnation: str) -> None:
        self.registered_until = 0.0

    async def publish(
        self,
        model: str,
        worker_id: str,
        incarnation: str,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        tier: Tier,
    ) -> int:
        self.seq += 1
        self.kept_until |= dict.fromkeys(stored, now() + DEFAULT_KEEP_S)
        return await self.renew(model, worker_id, incarnation, tier)

    async def renew(self, model: str, worker_id: str, incarnation: str, tier: Tier) -> int:
        self.num_calls += 1
        self.lease_until = now() + DEFAULT_LEASE_S
        return self.seq

    async def drop_worker(self, model: str, worker_id: str, incarnation: str, tier: Tier) -> None:
        self.kept_until.clear()


def test_worker_and_its_blocks_are_known_throughout() -> None:
    # RD-03
    async def idle() -> None:
        redis = ForgetfulRedis()
        publisher = BlockPublisher(redis, "m", "w", "i1")
        heartbeat = Heartbeat(redis, registered("d0").record, WorkerLoad)  # type: ignore[arg-type]
        async with heartbeat, publisher:
            publisher.offer(BlockEvents(stored=KEYS))
            while now() < IDLE_S:
                await asyncio.sleep(7)
                assert redis.registered_until > now()
                assert redis.lease_until > now()
                assert len(redis.kept_until) == len(KEYS)
                assert min(redis.kept_until.values()) > now()

        # An idle worker is no load.
        assert redis.num_calls < 3 * IDLE_S

    virtual_time.run(idle())
