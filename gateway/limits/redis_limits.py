"""Limits that all gateways share: one script for each decision."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from gateway.limits import scripts
from gateway.limits.scopes import Scope, Verdict
from mesh.redis_client import MeshRedis

_MAX_AT_A_TIME = 16


class RedisLimits:
    """Every failure is a RedisError, within bounds."""

    def __init__(self, redis: MeshRedis, *, lease_ms: int, time: str = scripts.TIME) -> None:
        """`time` is Lua that sets `now`, in ms."""
        self._lease_ms = lease_ms
        # A burst waits here rather than for a connection: that wait has a short end, and who
        # comes to it is decided about by one gateway alone.
        self._turns = asyncio.Semaphore(_MAX_AT_A_TIME)
        self._admit = redis.register_script(time + scripts.ADMIT_BODY)
        self._settle = redis.register_script(time + scripts.SETTLE_BODY)
        self._renew = redis.register_script(time + scripts.RENEW_BODY)

    async def admit(self, lease: str, num_tokens: int, scopes: Sequence[Scope]) -> Verdict:
        async with self._turns:
            answer: Any = await self._admit(
                keys=_keys(scopes), args=[lease, self._lease_ms, num_tokens, *_arguments(scopes)]
            )
        return Verdict.parse(answer)

    async def settle(self, lease: str, surplus: int, scopes: Sequence[Scope]) -> None:
        async with self._turns:
            await self._settle(
                keys=_keys(scopes), args=[lease, self._lease_ms, surplus, *_arguments(scopes)]
            )

    async def renew(self, slots: str, leases: Collection[str]) -> None:
        """These requests of one scope still run; known or not, they have a slot from now on."""
        await self._renew(keys=[slots], args=[self._lease_ms, *leases])


def _keys(scopes: Sequence[Scope]) -> list[str]:
    return [key for scope in scopes for key in (scope.keys.bucket, scope.keys.slots)]


def _arguments(scopes: Sequence[Scope]) -> list[int]:
    return [argument for scope in scopes for argument in scope.arguments()]
