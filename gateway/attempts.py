"""How often one choice may start again, where, and after which wait."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.generation import Job
from mesh import metrics
from mesh.client import is_connection_lost
from mesh.errors import (
    Draining,
    KvLeaseExpired,
    KvTransferFailed,
    MeshError,
    QueueFull,
    WorkerUnavailable,
)
from mesh.v1 import scheduler_pb2

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 1.0


class WorkerLost(WorkerUnavailable):
    """The connection to a worker broke, or nothing came over it for too long."""


@contextmanager
def worker_losses(worker_id: str, timeout_s: float) -> Iterator[None]:
    """Turn what a wait for a worker's message raises into WorkerLost, where that is what it is."""
    try:
        yield
    except TimeoutError:
        raise WorkerLost(f"{worker_id} was silent for {timeout_s:g} s") from None
    except MeshError as error:
        if is_connection_lost(error):
            raise WorkerLost(f"{worker_id}: {error}") from error
        raise


@dataclass(frozen=True)
class AttemptLimits:
    """How long a choice is kept alive when workers fail."""

    # Attempts that failed on a worker, the last one included.
    max_attempts: int = 3
    # For a choice that has lost its worker while there is no other.
    max_wait_s: float = 15.0


class Attempts:
    """How often one choice may start again on other workers, and which it avoids."""

    def __init__(self, job: Job, limits: AttemptLimits) -> None:
        self._job = job
        self._limits = limits
        self._num_failures = 0
        # Since when there has been nobody to go to.
        self._waiting_since: float | None = None
        self._delay_s = _FIRST_DELAY_S
        self.excluded_worker_ids: set[str] = set()
        # Whom to blame when a call fails; None while there is no placement.
        self.worker: scheduler_pb2.WorkerRef | None = None
        # Processes that were lost, by worker and incarnation.
        self._lost: set[tuple[str, str]] = set()
        job.trace.num_attempts += 1

    async def after(self, error: MeshError) -> None:
        """Get ready to go on after `error`, or raise it again."""
        failed, self.worker = self.worker, None
        if failed is None or self._is_still_lost(failed, error):
            await self._wait(error)
        else:
            self._leave(failed.worker_id, error)
            self._job.trace.num_attempts += 1
        metrics.RESUMPTIONS.add(1, {"error.type": error.reason})
        logger.warning(
            "request goes on elsewhere",
            extra={
                "error": type(error).__name__,
                "reason": str(error),
                "worker_id": None if failed is None else failed.worker_id,
                "num_output_tokens": len(self._job.output_token_ids),
            },
        )

    def _is_still_lost(self, worker: scheduler_pb2.WorkerRef, error: MeshError) -> bool:
        """Whether a worker that was lost was placed on once more, before its successor is there.

        Its registration lives on for a while. Such an attempt says nothing new of anybody.
        """
        if not isinstance(error, WorkerLost):
            return False
        process = (worker.worker_id, worker.incarnation)
        is_known = process in self._lost
        self._lost.add(process)
        return is_known

    def _leave(self, worker_id: str, error: MeshError) -> None:
        self._waiting_since, self._delay_s = None, _FIRST_DELAY_S
        if isinstance(error, Draining):
            # Announced, and nobody's fault: a long answer may move as often as workers do.
            self.excluded_worker_ids.add(worker_id)
            return
        self._num_failures += 1
        if self._num_failures >= self._limits.max_attempts:
            raise error
        if isinstance(error, WorkerUnavailable | QueueFull):
            self.excluded_worker_ids.add(worker_id)
        elif not isinstance(error, KvLeaseExpired | KvTransferFailed):
            raise error

    async def _wait(self, error: MeshError) -> None:
        """There was no worker. Whoever has begun waits for one instead of giving up."""
        has_begun = self._job.output_token_ids or self.excluded_worker_ids or self._num_failures
        if not has_begun or not isinstance(error, WorkerUnavailable | QueueFull):
            raise error
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since >= self._limits.max_wait_s:
            raise error
        # Nobody else is there, but whoever failed may be back.
        self.excluded_worker_ids.clear()
        await asyncio.sleep(min(error.retry_after_s or _MAX_DELAY_S, self._delay_s))
        self._delay_s = min(2 * self._delay_s, _MAX_DELAY_S)


def worker_failure(error: MeshError) -> "scheduler_pb2.WorkerFailure.ValueType | None":
    """What `error` says of the worker that raised it; None: nothing.

    A worker that drains or is full is well, and lost KV may be anybody's. An internal error comes
    with the request, which would fail everywhere.
    """
    if isinstance(error, WorkerLost):
        return scheduler_pb2.WORKER_FAILURE_LOST
    if isinstance(error, WorkerUnavailable) and not isinstance(error, Draining):
        return scheduler_pb2.WORKER_FAILURE_FAULTY
    return None
