"""What the other schedulers have charged to the workers: none of them is special."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import astuple

import orjson
from redis.exceptions import RedisError

from mesh.redis_client import MeshRedis
from scheduler_svc.workers import ActiveLoad

logger = logging.getLogger(__name__)

# The hash tag puts all schedulers into one slot of a Redis Cluster.
_CHARGES = "mesh:{scheduler}:charges"

# One hash: scheduler -> {"until": ms, "charges": ...}. One whose time is over is forgotten.
#
# KEYS: charges. ARGV: own id, own charges, time to live in ms. Returns those of the others.
_EXCHANGE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d:', now + ARGV[3]) .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
local result, all = {}, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local ends, charges = string.match(all[i + 1], '^(%d+):(.*)$')
  if tonumber(ends) < now then
    redis.call('HDEL', KEYS[1], all[i])
  elseif all[i] ~= ARGV[1] then
    result[#result + 1] = charges
  end
end
return result
"""

Charges = Mapping[str, ActiveLoad]


class Peers:
    """Exchanges charges through Redis. A scheduler that dies is out of the sums after `ttl_s`;
    until then, and while Redis is away, the workers' own reports bound the error."""

    def __init__(
        self, redis: MeshRedis, scheduler_id: str, *, ttl_s: float = 2.0, timeout_s: float = 0.5
    ) -> None:
        self._scheduler_id = scheduler_id
        self._ttl_ms = int(ttl_s * 1000)
        self._timeout_s = timeout_s
        self._exchange = redis.register_script(_EXCHANGE)

    async def exchange(self, own: Charges) -> Charges:
        """Tell our charges and return the sums of the others', by holder; nothing on failure."""
        told = orjson.dumps({holder_id: astuple(load) for holder_id, load in own.items()})
        try:
            async with asyncio.timeout(self._timeout_s):
                others = await self._exchange(
                    keys=[_CHARGES], args=[self._scheduler_id, told, self._ttl_ms]
                )
        except (RedisError, OSError, TimeoutError):
            # The registry, asked at the same time, reports the outage.
            return {}
        sums: dict[str, ActiveLoad] = {}
        for charges in others:
            for holder_id, load in _parse(charges).items():
                sums[holder_id] = sums.get(holder_id, ActiveLoad()) + load
        return sums


def _parse(told: bytes) -> Charges:
    """Nothing for what another version of pdmesh wrote and this one cannot use."""
    try:
        return {holder_id: ActiveLoad(*load) for holder_id, load in orjson.loads(told).items()}
    except (ValueError, TypeError, AttributeError) as error:
        logger.warning("unreadable charges of a scheduler", extra={"error": repr(error)})
        return {}
