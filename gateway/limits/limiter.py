"""What a caller may use: taken before a request runs, settled when it is over."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from redis.exceptions import RedisError

from gateway.keys.model import Caller, Limits
from gateway.limits.headers import limit_headers
from gateway.limits.local import LocalLimits
from gateway.limits.redis_limits import RedisLimits
from gateway.limits.refusal import LimitExceeded
from gateway.limits.scopes import Decider, Scope, Verdict, scopes_of
from gateway.poller import Poller
from mesh import metrics
from mesh.errors import WorkerUnavailable
from mesh.redis_client import MeshRedis

logger = logging.getLogger(__name__)

# How long the slots of a gateway that died stay taken.
LEASE_S = 30.0
_RENEWALS = 3
_END_TIMEOUT_S = 2.0


@dataclass
class Admission:
    """What a running request holds of its limits."""

    headers: Mapping[str, str] = field(default_factory=dict)
    num_reserved: int = 0
    # What it has used in the end; nothing, unless somebody says so.
    num_used: int = 0


class Limiter:
    """Asks Redis, which all gateways share. While it does not answer, each gateway counts by
    itself, up to `local_share` of each limit."""

    def __init__(
        self, redis: MeshRedis, *, local_share: float = 1.0, lease_s: float = LEASE_S
    ) -> None:
        lease_ms = int(lease_s * 1000)
        self._redis = redis
        self._shared = RedisLimits(redis, lease_ms=lease_ms)
        self._local = LocalLimits(lease_ms=lease_ms)
        self._local_share = local_share
        self._is_local = False
        # Leases of running requests, and what they count against.
        self._running: dict[str, tuple[Scope, ...]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._poller = Poller("limits", self.renew, lease_s / _RENEWALS)

    async def __aenter__(self) -> Self:
        await self._poller.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._poller.__aexit__(*exc_info)
        if self._ending:
            await asyncio.wait(self._ending, timeout=_END_TIMEOUT_S)

    @asynccontextmanager
    async def admitted(self, caller: Caller, num_tokens: int) -> AsyncIterator[Admission]:
        """Reserve `num_tokens` for a request, and settle what it used when the block is left.

        Raises LimitExceeded; WorkerUnavailable where nobody may decide.
        """
        scopes = scopes_of(caller)
        if not scopes:
            yield Admission()
            return
        lease = uuid.uuid4().hex
        decider, scopes, verdict = await self._decide(lease, num_tokens, scopes)
        headers = limit_headers(scopes, verdict)
        if not verdict.is_admitted:
            metrics.REFUSALS.add(1, {"reason": str(verdict.limit)})
            raise LimitExceeded(scopes[verdict.scope_index], verdict, num_tokens, headers)
        admission = Admission(headers, num_tokens)
        self._running[lease] = scopes
        try:
            yield admission
        finally:
            del self._running[lease]
            surplus = num_tokens - admission.num_used
            self._later(self._settle(decider, lease, surplus, scopes))

    async def renew(self) -> None:
        """Keep the slots of what runs."""
        by_slots: dict[str, list[str]] = {}
        for lease, scopes in self._running.items():
            for scope in scopes:
                if scope.limits.max_concurrency is not None:
                    self._local.renew(lease, scope)
                    by_slots.setdefault(scope.keys.slots, []).append(lease)
        # The breaker has told already; slots that are lost come back with the next renewal.
        with suppress(RedisError):
            for slots, leases in by_slots.items():
                await self._shared.renew(slots, leases)

    async def _decide(
        self, lease: str, num_tokens: int, scopes: tuple[Scope, ...]
    ) -> tuple[Decider, tuple[Scope, ...], Verdict]:
        asking = asyncio.ensure_future(self._shared.admit(lease, num_tokens, scopes))
        try:
            verdict = await asyncio.shield(asking)
        except asyncio.CancelledError:
            # The script runs all the same: what it takes is given back.
            self._later(self._undo(asking, lease, num_tokens, scopes))
            raise
        except RedisError as error:
            self._went_local(error)
            if self._local_share == 0:
                raise WorkerUnavailable("limits cannot be checked at the moment") from error
            shares = tuple(_share(scope, self._local_share) for scope in scopes)
            return self._local, shares, await self._local.admit(lease, num_tokens, shares)
        self._went_shared()
        return self._shared, scopes, verdict

    async def _undo(
        self,
        asking: "asyncio.Future[Verdict]",
        lease: str,
        num_tokens: int,
        scopes: Sequence[Scope],
    ) -> None:
        with suppress(RedisError):
            if (await asking).is_admitted:
                await self._settle(self._shared, lease, num_tokens, scopes)

    async def _settle(
        self, decider: Decider, lease: str, surplus: int, scopes: Sequence[Scope]
    ) -> None:
        try:
            await decider.settle(lease, surplus, scopes)
        except RedisError as error:
            # Reserved tokens come back within a minute, slots when their lease ends.
            logger.debug("limits were not settled", extra={"error": repr(error)})

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Nobody waits for it."""
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _went_local(self, error: RedisError) -> None:
        if not self._is_local:
            logger.warning(
                "limits are counted by this gateway alone until Redis answers",
                extra={"error": repr(error), "local_share": self._local_share},
            )
        self._is_local = True

    def _went_shared(self) -> None:
        if self._is_local:
            logger.info("limits are shared again")
            self._local.forget()
        self._is_local = False


def _share(scope: Scope, share: float) -> Scope:
    """The part of a scope's limits that one gateway allows by itself; never nothing."""
    limits = {
        name: None if limit is None else max(1, int(limit * share))
        for name, limit in scope.limits.model_dump().items()
    }
    return Scope(scope.keys, Limits(**limits), scope.name)
