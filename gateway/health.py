"""Whether the mesh makes progress, as the gateway can see it."""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Self

from gateway.openai.responses import Health
from gateway.placement import Scheduler
from gateway.tokenizer import ModelCatalog
from mesh.errors import MeshError
from mesh.v1 import scheduler_pb2

logger = logging.getLogger(__name__)

_CHECK_TIMEOUT_S = 2.0
# A check that is itself stuck is no good news.
_MAX_AGE_S = 5.0


class HealthMonitor:
    """Asks tokenizer and scheduler regularly and remembers who has stopped stepping."""

    def __init__(
        self, catalog: ModelCatalog, scheduler: Scheduler, *, interval_s: float, stall_s: float
    ) -> None:
        self._catalog = catalog
        self._scheduler = scheduler
        self._interval_s = interval_s
        self._stalls = StallDetector(stall_s)
        self._problems = ["starting"]
        self._num_workers = {"prefill": 0, "decode": 0}
        self._state = scheduler_pb2.GetStateResponse()
        self._checked_at = time.monotonic()
        self._is_draining = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch(), name="health")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def drain(self) -> None:
        """Unhealthy from now on: no new requests, please."""
        self._is_draining = True

    def problems(self) -> list[str]:
        """Why requests would fail; empty when they would not."""
        problems = list(self._problems)
        if self._is_draining:
            problems.append("draining")
        age_s = time.monotonic() - self._checked_at
        if age_s > self._interval_s + _MAX_AGE_S:
            problems.append(f"not checked for {age_s:.0f} s")
        return problems

    @property
    def state(self) -> scheduler_pb2.GetStateResponse:
        """What the scheduler said last; empty while it says nothing."""
        return self._state

    def report(self) -> Health:
        """The body of /health."""
        problems = self.problems()
        return {
            "status": "unavailable" if problems else "ok",
            "problems": problems,
            "workers": dict(self._num_workers),
        }

    async def check(self) -> None:
        """Ask everyone once."""
        tokenizer, scheduler = await asyncio.gather(
            self._check_tokenizer(), self._check_scheduler()
        )
        problems = tokenizer + scheduler
        if problems != self._problems:
            logger.info("health changed", extra={"problems": problems})
        self._problems = problems
        self._checked_at = time.monotonic()

    async def _watch(self) -> None:
        while True:
            try:
                await self.check()
            except Exception:
                # A watcher must not die of a bug: what it last saw grows old and tells.
                logger.exception("health check failed")
            await asyncio.sleep(self._interval_s)

    async def _check_tokenizer(self) -> list[str]:
        try:
            # Keeps what the gateway knows of the models fresh, too.
            await self._catalog.refresh(_CHECK_TIMEOUT_S)
        except MeshError as error:
            return [f"tokenizer: {error.reason}"]
        return [] if await self._catalog.all() else ["tokenizer: no model is loaded"]

    async def _check_scheduler(self) -> list[str]:
        try:
            state = await self._scheduler.get_state(_CHECK_TIMEOUT_S)
        except MeshError as error:
            self._num_workers = {"prefill": 0, "decode": 0}
            self._state = scheduler_pb2.GetStateResponse()
            return [f"scheduler: {error.reason}"]
        self._state = state
        self._num_workers = {
            role: sum(worker.role == role for worker in state.workers)
            for role in ("prefill", "decode")
        }
        problems = self._stalls.check(list(state.workers), time.monotonic())
        # A decode worker can compute prompts too; a prefill worker alone is of no use.
        if self._num_workers["decode"] == 0:
            problems.append("scheduler: no decode worker is alive")
        return problems


class StallDetector:
    """Finds workers that have work and take no step."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        # By worker and incarnation: the last step count and since when it stands still.
        self._progress: dict[tuple[str, str], tuple[int, float]] = {}

    def check(self, workers: list[scheduler_pb2.WorkerState], now: float) -> list[str]:
        progress: dict[tuple[str, str], tuple[int, float]] = {}
        problems = []
        for worker in workers:
            key = (worker.worker_id, worker.incarnation)
            num_steps, since = self._progress.get(key, (-1, now))
            if worker.load.num_running == 0 or worker.load.num_steps != num_steps:
                since = now
            progress[key] = (worker.load.num_steps, since)
            if now - since >= self._stall_s:
                problems.append(
                    f"{worker.worker_id}: {worker.load.num_running} running requests and no step "
                    f"for {now - since:.0f} s"
                )
        self._progress = progress
        return problems
