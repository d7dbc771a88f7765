"""The workers as the registry told last: refreshed in the background, kept through outages."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from redis.exceptions import RedisError

from mesh.block_keys import layout_difference
from mesh.registry import RegisteredWorker
from scheduler_svc.peers import Charges
from scheduler_svc.prefix_lookup import BlockLayout
from scheduler_svc.workers import IDLE, ActiveLoad, Role, WorkerView

logger = logging.getLogger(__name__)

_ROLES = frozenset(role.value for role in Role)


class WorkerSource(Protocol):
    """The part of `mesh.registry.WorkerRegistry` that the scheduler reads."""

    async def list(self) -> list[RegisteredWorker]: ...


# Returns when workers have joined or left, or after so many seconds.
WaitForChange = Callable[[float], Awaitable[None]]

# Tells our charges and returns those of the other schedulers.
Exchange = Callable[[Charges], Awaitable[Charges]]


class Cluster:
    """Owns the snapshot of live workers, and of what other schedulers have charged to them.

    A worker whose record is gone while the registry answers is gone. While it does not answer,
    the last snapshot stands for `max_outage_s`, which is long: who of it has died is found out by
    its breaker, and without it nobody would be served. For `recovery_s` afterwards workers are only
    added, since a registry that restarted empty hears of them with their next heartbeats. All
    workers vanishing at once is taken for such a restart too.
    """

    def __init__(
        self,
        source: WorkerSource,
        *,
        interval_s: float = 0.25,
        timeout_s: float = 1.0,
        max_outage_s: float = 86_400.0,
        recovery_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._timeout_s = timeout_s
        self._max_outage_s = max_outage_s
        self._recovery_s = recovery_s
        self._clock = clock
        # By worker id: a new incarnation replaces the one before.
        self._workers: dict[str, RegisteredWorker] = {}
        self._views: list[WorkerView] = []
        self._layouts: dict[str, frozenset[BlockLayout]] = {}
        self._answered_at = clock()
        self._is_out = False
        self._recovering_until: float | None = None
        self._models_seen: set[str] = set()
        self._listeners: list[Callable[[], None]] = []
        self._exchange: Exchange | None = None
        self._watch = _Watch(interval_s)
        self._own_charges: Callable[[], Charges] = dict
        self._others: Charges = {}

    @property
    def workers(self) -> list[RegisteredWorker]:
        return list(self._workers.values())

    @property
    def views(self) -> list[WorkerView]:
        """The same workers as placement sees them, without charges."""
        return self._views

    def layouts(self, model: str) -> frozenset[BlockLayout]:
        """The block layouts of the workers that serve a model."""
        return self._layouts.get(model, frozenset())

    def has_served(self, model: str) -> bool:
        """Whether a worker with the model was ever seen: it may come back."""
        return model in self._models_seen

    def charged_by_others(self, holder_id: str) -> ActiveLoad:
        """What other schedulers have charged to a worker, as of the last refresh."""
        return self._others.get(holder_id, IDLE)

    def share_charges(self, own: Callable[[], Charges], exchange: Exchange) -> None:
        """Tell other schedulers what `own` returns with every refresh, and hear of theirs."""
        self._own_charges = own
        self._exchange = exchange

    def on_refresh(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever workers or their loads may have changed."""
        self._listeners.append(listener)

    def watch(self, wait_for_change: WaitForChange, idle_interval_s: float) -> None:
        """While nothing is charged to any worker, refresh when workers join or leave, and at
        least every `idle_interval_s`."""
        self._watch = _Watch(self._watch.interval_s, wait_for_change, idle_interval_s)

    def hurry(self) -> None:
        """There is work to place: refresh soon."""
        self._watch.hurry()

    async def run(self) -> None:
        """Refresh until cancelled."""
        try:
            while True:
                await self.refresh()
                is_idle = not (self._is_out or self._others or self._own_charges())
                await self._watch.pause(is_idle=is_idle)
        finally:
            self._watch.close()

    async def refresh(self) -> None:
        """Ask the registry once. Its failure is survived here and told to nobody else."""
        try:
            async with asyncio.timeout(self._timeout_s):
                listed = await self._source.list()
                if self._exchange is not None:
                    self._others = await self._exchange(self._own_charges())
        except (RedisError, OSError, TimeoutError) as error:
            self._outage(error)
        else:
            self._answered(listed)
        for listener in self._listeners:
            listener()

    def _answered(self, listed: list[RegisteredWorker]) -> None:
        now = self._clock()
        # A role that this version does not know is somebody else's to use.
        current = {one.record.worker_id: one for one in listed if one.record.role in _ROLES}
        has_vanished = bool(self._workers) and not current and self._recovering_until is None
        if self._is_out or has_vanished:
            self._recovering_until = now + self._recovery_s
        if self._recovering_until is not None and now < self._recovering_until:
            current = {**self._workers, **current}
        else:
            self._recovering_until = None
        if self._is_out:
            logger.info("registry is back", extra={"num_workers": len(listed)})
        self._is_out = False
        self._answered_at = now
        self._replace(current)

    def _outage(self, error: Exception) -> None:
        if not self._is_out:
            self._is_out = True
            logger.warning(
                "registry does not answer, placing by the last snapshot",
                extra={"error": repr(error), "num_workers": len(self._workers)},
            )
        # What the others have charged is old by now, and the workers' reports are too.
        self._others = {}
        if self._clock() - self._answered_at > self._max_outage_s:
            self._replace({})

    def _replace(self, current: dict[str, RegisteredWorker]) -> None:
        before, after = _holders(self._workers), _holders(current)
        if before != after:
            logger.info(
                "workers changed",
                extra={"joined": sorted(after - before), "left": sorted(before - after)},
            )
            _warn_of_strangers(current)
        self._models_seen.update(worker.record.model for worker in current.values())
        self._workers = current
        self._views = [_view(worker) for worker in current.values()]
        layouts: dict[str, set[BlockLayout]] = {}
        for view in self._views:
            layout = BlockLayout(view.layout_fingerprint, view.block_size)
            layouts.setdefault(view.model, set()).add(layout)
        self._layouts = {model: frozenset(found) for model, found in layouts.items()}


class _Watch:
    """How long a view of the workers is good for."""

    def __init__(
        self,
        interval_s: float,
        wait_for_change: WaitForChange = asyncio.sleep,
        idle_interval_s: float | None = None,
    ) -> None:
        self.interval_s = interval_s
        self._wait_for_change = wait_for_change
        self._idle_interval_s = idle_interval_s or interval_s
        self._hurried = asyncio.Event()
        # Outlives a pause that was cut short, so that no two are under way.
        self._waiting: asyncio.Future[None] | None = None

    def hurry(self) -> None:
        self._hurried.set()

    async def pause(self, *, is_idle: bool) -> None:
        if not is_idle:
            await asyncio.sleep(self.interval_s)
            self._hurried.clear()
            return
        if self._waiting is None:
            self._waiting = asyncio.ensure_future(self._wait_for_change(self._idle_interval_s))
        hurried = asyncio.create_task(self._hurried.wait())
        news: list[asyncio.Future[Any]] = [self._waiting, hurried]
        await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        self._hurried.clear()
        if self._waiting.done():
            error, self._waiting = self._waiting.exception(), None
            if error is not None:
                # The refresh that follows tells of an outage.
                logger.debug("no news of workers", extra={"error": repr(error)})
                await asyncio.sleep(self.interval_s)

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()


def _holders(workers: dict[str, RegisteredWorker]) -> set[str]:
    return {worker.record.holder for worker in workers.values()}


def _warn_of_strangers(workers: Mapping[str, RegisteredWorker]) -> None:
    """Say so when workers of one model cannot exchange blocks, and why."""
    decoders = [one.record for one in workers.values() if one.record.role == "decode"]
    for worker in workers.values():
        prefill = worker.record
        if prefill.role != "prefill":
            continue
        partners = [decode for decode in decoders if decode.model == prefill.model]
        if partners and all(
            decode.layout_fingerprint != prefill.layout_fingerprint for decode in partners
        ):
            logger.warning(
                "no decode worker can use a prefill worker's blocks",
                extra={
                    "worker_id": prefill.worker_id,
                    "decode_worker_id": partners[0].worker_id,
                    "difference": layout_difference(prefill.layout, partners[0].layout),
                },
            )


def _view(worker: RegisteredWorker) -> WorkerView:
    record, load = worker.record, worker.load
    return WorkerView(
        worker_id=record.worker_id,
        incarnation=record.incarnation,
        holder_id=record.holder,
        role=Role(record.role),
        address=record.address,
        model=record.model,
        layout_fingerprint=record.layout_fingerprint,
        block_size=record.block_size,
        num_blocks=record.num_blocks,
        max_model_len=record.max_model_len,
        transfer_address=record.transfer_address,
        cpus=frozenset(record.cpus),
        num_threads=record.num_threads,
        reported=ActiveLoad(
            num_requests=load.num_running + load.num_waiting,
            prefill_tokens=load.num_waiting_tokens,
            blocks=load.num_blocks - load.num_free_blocks,
        ),
    )
