"""Blocks in Redis: which worker holds which block, in which tier."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from mesh import block_scripts
from mesh.block_keys import KEY_BYTES
from mesh.block_scripts import IndexKeys
from mesh.redis_client import MeshRedis

# How long a holder's blocks count after its last publication or renewal.
DEFAULT_LEASE_S = 30.0
# Entries end by themselves after this, however they were left behind; what is held longer must
# be published again within it.
DEFAULT_KEEP_S = 1800.0
# Blocks that one holder may have in one tier of the index.
DEFAULT_MAX_BLOCKS = 1_000_000
# Events that are kept for schedulers that lag behind.
DEFAULT_MAX_EVENTS = 4096
# What one script call touches at most: Redis serves nobody else meanwhile.
BATCH = 512

Tier = Literal["device", "host", "disk"]
# Warmest first.
TIERS: tuple[Tier, ...] = ("device", "host", "disk")

_MACHINE = "machine:"

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Leading blocks of a prompt that a worker can reach, each counted in its warmest tier."""

    device_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0

    @property
    def num_blocks(self) -> int:
        return self.device_blocks + self.host_blocks + self.disk_blocks

    def bounded(self, num_blocks: int) -> "PrefixHit":
        """The part within the first `num_blocks`; the warmest tiers hold the first blocks."""
        if self.num_blocks <= num_blocks:
            return self
        device = min(self.device_blocks, num_blocks)
        host = min(self.host_blocks, num_blocks - device)
        return PrefixHit(device, host, min(self.disk_blocks, num_blocks - device - host))

    def extended(self, colder: "PrefixHit") -> "PrefixHit":
        """This, and what lies behind it in a colder store that begins with the same blocks."""
        num_more = colder.num_blocks - self.num_blocks
        if num_more <= 0:
            return self
        num_on_disk = min(num_more, colder.disk_blocks)
        return PrefixHit(
            self.device_blocks,
            self.host_blocks + num_more - num_on_disk,
            self.disk_blocks + num_on_disk,
        )


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One publication, as those who follow the index see it."""

    event_id: str
    # `worker_id@incarnation#tier`; its events are numbered from 1 without gaps.
    shelf: str
    seq: int
    # Changes when Redis has lost its data.
    run_id: str
    stored: Sequence[bytes]
    removed: Sequence[bytes]
    # The shelf is gone with all it held.
    is_drop: bool = False


@dataclass(frozen=True, slots=True)
class IndexState:
    """Where the index stands: what a follower compares its copy with."""

    run_id: str
    last_event_id: str
    # The number of the last event of each live shelf.
    seqs: Mapping[str, int]


class BlockIndex:
    """Who holds which block. Every failure is a RedisError, within bounds.

    Entries are hints: a lookup may name a holder that is gone or has evicted the
    block, so callers drop holders that are not registered, and workers check.
    """

    def __init__(
        self,
        redis: MeshRedis,
        *,
        lease_s: float = DEFAULT_LEASE_S,
        keep_s: float = DEFAULT_KEEP_S,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        max_events: int = DEFAULT_MAX_EVENTS,
    ) -> None:
        self._redis = redis
        self._lease_ms = int(lease_s * 1000)
        self._keep_ms = int(keep_s * 1000)
        self._max_blocks = max_blocks
        self._max_events = max_events
        self._publish = redis.register_script(block_scripts.PUBLISH)
        self._renew = redis.register_script(block_scripts.RENEW)
        self._drop = redis.register_script(block_scripts.DROP)
        self._longest_prefix = redis.register_script(block_scripts.LONGEST_PREFIX)
        self._state = redis.register_script(block_scripts.STATE)

    async def publish(
        self,
        model: str,
        worker_id: str,
        incarnation: str,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        tier: Tier = "device",
    ) -> int:
        """Record what a worker gained and lost; returns the number of its last event.

        Atomic, and one event, for up to 512 changes. A key in both lists counts as stored.
        Numbers go up by one with each event: another one says that Redis has lost something
        of this worker, which then publishes all it holds again. Beyond the bound of a worker
        nothing is stored.
        """
        kept = set(stored)
        changes = [(key, True) for key in removed if key not in kept]
        changes += [(key, False) for key in stored]
        seq = 0
        for batch in batches(changes, BATCH):
            lost = [key for key, is_removal in batch if is_removal]
            gained = [key for key, is_removal in batch if not is_removal]
            seq = await self._publish_batch(
                IndexKeys(model), shelf_name(worker_id, incarnation, tier), gained, lost
            )
        return seq

    async def renew(
        self, model: str, worker_id: str, incarnation: str, tier: Tier = "device"
    ) -> int:
        """Extend a worker's lease; returns the number of its last event, 0 if there is none.

        Clears away a part of what those left behind whose lease has ended.
        """
        keys, shelf = IndexKeys(model), shelf_name(worker_id, incarnation, tier)
        args: list[str | int] = [
            shelf,
            self._lease_ms,
            self._keep_ms,
            keys.tag,
            BATCH,
            self._max_events,
        ]
        return int(await self._renew(keys=[*keys.shared, keys.held(shelf)], args=args))

    async def drop_worker(
        self, model: str, worker_id: str, incarnation: str, tier: Tier | None = None
    ) -> None:
        """Forget everything that one process held, in one tier or in all, in bounded steps."""
        keys = IndexKeys(model)
        for one in TIERS if tier is None else (tier,):
            shelf = shelf_name(worker_id, incarnation, one)
            left = 1
            while left:
                args: list[str | int] = [shelf, keys.tag, BATCH, self._max_events]
                left = int(await self._drop(keys=[*keys.shared, keys.held(shelf)], args=args))

    async def longest_prefix(self, model: str, keys: Sequence[bytes]) -> dict[str, PrefixHit]:
        """What each holder (`worker_id@incarnation`) has of the leading blocks.

        One round trip. Holders without the first block are not named.
        """
        if not keys:
            return {}
        names = IndexKeys(model)
        found: list[Any] = await self._longest_prefix(
            keys=[names.leases, *(names.block(key.hex()) for key in keys)]
        )
        return {_text(holder): PrefixHit(*map(int, counts)) for holder, *counts in found}

    async def state(self, model: str) -> IndexState:
        """All live shelves and the last event, in one round trip."""
        keys = IndexKeys(model)
        run_id, last_event_id, *flat = await self._state(keys=keys.shared)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return IndexState(
            _text(run_id), _text(last_event_id), {_text(shelf): int(seq) for shelf, seq in pairs}
        )

    async def events_after(self, model: str, event_id: str, limit: int = BATCH) -> list[BlockEvent]:
        """The events that followed one, oldest first."""
        events: Any = await self._redis.xrange(
            IndexKeys(model).events, min=f"({event_id}", max="+", count=limit
        )
        return [_event(event_id, fields) for event_id, fields in events]

    async def wait_for_event(self, model: str, event_id: str, wait_s: float) -> None:
        """Until an event follows one, at most for `wait_s`, which the client's timeout exceeds."""
        await self._redis.xread(
            {IndexKeys(model).events: event_id}, count=1, block=max(1, int(1000 * wait_s))
        )

    async def blocks_of(self, model: str, shelf: str, cursor: int) -> tuple[int, list[bytes]]:
        """A page of what one shelf holds and the cursor of the next one, 0 after the last.

        What is there from the first page to the last is on one of them.
        """
        held = IndexKeys(model).held(shelf)
        following, page = await self._redis.sscan(held, cursor, count=4 * BATCH)
        return int(following), [bytes.fromhex(_text(key)) for key in page]

    async def _publish_batch(
        self, keys: IndexKeys, shelf: str, stored: Sequence[bytes], removed: Sequence[bytes]
    ) -> int:
        changed = [key.hex() for key in (*removed, *stored)]
        seq = await self._publish(
            keys=[*keys.shared, keys.held(shelf), *map(keys.block, changed)],
            args=[
                shelf,
                self._lease_ms,
                self._keep_ms,
                self._max_blocks,
                self._max_events,
                secrets.token_hex(8),
                len(removed),
                b"".join(removed),
                b"".join(stored),
                *changed,
            ],
        )
        return int(seq)


def shelf_name(worker_id: str, incarnation: str, tier: Tier) -> str:
    return f"{worker_id}@{incarnation}#{tier}"


def machine_holder_id(transfer_address: str) -> str:
    """The worker id under which a machine's agent publishes its host and disk tiers.

    All workers with this transfer address can reach them.
    """
    return f"{_MACHINE}{transfer_address}"


def machine_of(holder: str) -> str | None:
    """The transfer address of a holder that is a machine; None for a worker."""
    worker_id, _, _ = holder.rpartition("@")
    return worker_id.removeprefix(_MACHINE) if worker_id.startswith(_MACHINE) else None


def split_shelf(shelf: str) -> tuple[str, str]:
    """The holder (`worker_id@incarnation`) and the tier."""
    holder, _, tier = shelf.rpartition("#")
    return holder, tier


def batches(values: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _event(event_id: bytes, fields: Mapping[bytes, bytes]) -> BlockEvent:
    return BlockEvent(
        event_id=_text(event_id),
        shelf=_text(fields[b"shelf"]),
        seq=int(fields[b"seq"]),
        run_id=_text(fields[b"run"]),
        stored=_split_keys(fields.get(b"stored", b"")),
        removed=_split_keys(fields.get(b"removed", b"")),
        is_drop=b"drop" in fields,
    )


def _split_keys(joined: bytes) -> list[bytes]:
    return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
