"""Blocks in Redis: which worker holds which block."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

from mesh.redis_client import MeshRedis

DEFAULT_TTL_S = 120.0
# What one script call touches at most: Redis serves nobody else meanwhile.
_BATCH = 512

Item = TypeVar("Item")

# Both directions change together. The reverse set is the holder's lease: entries end
# with it unless the holder publishes them again in time.
#
# KEYS: reverse set, blocks to remove, blocks to store.
# ARGV: holder, tier, TTL in ms, number of blocks to remove, hex keys in order of KEYS.
_PUBLISH = """
local holder, tier, ttl, num_removed = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
for i = 2, #KEYS do
  local key = ARGV[i + 3]
  if i - 1 <= num_removed then
    redis.call('HDEL', KEYS[i], holder)
    redis.call('SREM', KEYS[1], key)
  else
    redis.call('HSET', KEYS[i], holder, tier)
    redis.call('PEXPIRE', KEYS[i], ttl)
    redis.call('SADD', KEYS[1], key)
  end
end
redis.call('PEXPIRE', KEYS[1], ttl)
"""

# Walks the chain while some holder has every block so far. A holder whose lease has
# ended is forgotten on the way.
#
# KEYS: blocks in order. ARGV: prefix of reverse sets.
# Returns holder, number of leading blocks, holder, ...
_LONGEST_PREFIX = """
local counts, alive, leading = {}, {}, nil
for i, key in ipairs(KEYS) do
  local still, any = {}, false
  for _, holder in ipairs(redis.call('HKEYS', key)) do
    if alive[holder] == nil then
      alive[holder] = redis.call('EXISTS', ARGV[1] .. holder) == 1
    end
    if not alive[holder] then
      redis.call('HDEL', key, holder)
    elseif leading == nil or leading[holder] then
      still[holder], counts[holder], any = true, i, true
    end
  end
  if not any then
    break
  end
  leading = still
end
local result = {}
for holder, count in pairs(counts) do
  result[#result + 1] = holder
  result[#result + 1] = count
end
return result
"""

# KEYS: reverse set. ARGV: holder, prefix of blocks, batch size. Returns how many are left.
_DROP = """
for _, key in ipairs(redis.call('SPOP', KEYS[1], ARGV[3])) do
  redis.call('HDEL', ARGV[2] .. key, ARGV[1])
end
return redis.call('SCARD', KEYS[1])
"""


class BlockIndex:
    """Who holds which block. Every failure is a RedisError, within bounds.

    Entries are hints: a lookup may name a holder that is gone or has evicted the
    block, so callers drop holders that are not registered, and workers check.
    """

    def __init__(self, redis: MeshRedis, *, ttl_s: float = DEFAULT_TTL_S) -> None:
        self._ttl_ms = int(ttl_s * 1000)
        self._publish = redis.register_script(_PUBLISH)
        self._longest_prefix = redis.register_script(_LONGEST_PREFIX)
        self._drop = redis.register_script(_DROP)

    async def publish(
        self,
        model: str,
        worker_id: str,
        incarnation: str,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        tier: str = "device",
    ) -> None:
        """Record what a worker gained and lost.

        Atomic for up to 512 changes. A key in both lists counts as stored. What is held
        for longer than the TTL must be published again within it.
        """
        gained = [key.hex() for key in stored]
        kept = set(gained)
        lost = [key.hex() for key in removed if key.hex() not in kept]
        changes = [(key, True) for key in lost] + [(key, False) for key in gained]
        for batch in _batches(changes):
            num_removed = sum(is_removal for _, is_removal in batch)
            keys = [key for key, _ in batch]
            await self._publish(
                keys=[
                    _held(model, worker_id, incarnation),
                    *(_blocks(model) + key for key in keys),
                ],
                args=[f"{worker_id}@{incarnation}", tier, self._ttl_ms, num_removed, *keys],
            )

    async def longest_prefix(self, model: str, keys: Sequence[bytes]) -> dict[str, int]:
        """How many of the leading blocks each holder (`worker_id@incarnation`) has.

        One round trip. Holders without the first block are not named.
        """
        if not keys:
            return {}
        prefix = _blocks(model)
        flat: list[Any] = await self._longest_prefix(
            keys=[prefix + key.hex() for key in keys], args=[_held_prefix(model)]
        )
        return {
            holder.decode(): int(count) for holder, count in zip(flat[::2], flat[1::2], strict=True)
        }

    async def drop_worker(self, model: str, worker_id: str, incarnation: str) -> None:
        """Forget everything that one process held, in bounded steps."""
        left = 1
        while left:
            left = await self._drop(
                keys=[_held(model, worker_id, incarnation)],
                args=[f"{worker_id}@{incarnation}", _blocks(model), _BATCH],
            )


def _batches(values: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for start in range(0, len(values), _BATCH):
        yield values[start : start + _BATCH]


def _tag(model: str) -> str:
    """A hash tag: all keys of a model lie in one slot of a Redis Cluster."""
    return "mesh:{" + quote(model) + "}:"


def _blocks(model: str) -> str:
    return _tag(model) + "block:"


def _held(model: str, worker_id: str, incarnation: str) -> str:
    return f"{_held_prefix(model)}{worker_id}@{incarnation}"


def _held_prefix(model: str) -> str:
    return _tag(model) + "held:"
