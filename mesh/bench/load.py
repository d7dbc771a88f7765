"""Drives a client: a closed loop of users who wait for answers, or arrivals that do not wait."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mesh.bench.client import PlannedRequest, Recording
from mesh.bench.workloads import TimedRequest

Send = Callable[[PlannedRequest, Recording], Awaitable[None]]
OnDone = Callable[[Recording], None]

# A server that refuses at once would otherwise be asked thousands of times a second.
_PAUSE_AFTER_ERROR_S = 0.2


@dataclass
class Window:
    """A measured stretch of time and everything that was asked in it."""

    started_at: float
    # None: until the last answer.
    ends_at: float | None = None
    recordings: list[Recording] = field(default_factory=list)
    client_cpu_s: float = 0.0
    wall_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.ends_at is not None and time.perf_counter() >= self.ends_at

    @property
    def length_s(self) -> float:
        """From the first request to the end, or to the last token that came."""
        if self.ends_at is not None:
            return self.ends_at - self.started_at
        last = max((r.token_times[-1] for r in self.recordings if r.token_times), default=0.0)
        return max(last - self.started_at, 0.0)


@dataclass(frozen=True)
class Intruder:
    """Requests that come one at a time beside the others."""

    requests: Iterator[PlannedRequest]
    every_s: float
    delay_s: float


class LoadGenerator:
    """Sends requests and keeps what happened; one window at a time."""

    def __init__(self, send: Send, on_done: OnDone = lambda recording: None) -> None:
        self._send = send
        self._on_done = on_done

    async def closed_loop(
        self,
        requests: Iterator[PlannedRequest],
        concurrency: int,
        *,
        duration_s: float | None = None,
        grace_s: float = 30.0,
        intruder: Intruder | None = None,
    ) -> Window:
        """Keep `concurrency` requests in flight until they run out or the time is up.

        What is in flight at the end gets `grace_s` more; it is measured, but tokens that
        come after the end count for no throughput.
        """
        window = _open(duration_s)
        users = [self._user(requests, window) for _ in range(concurrency)]
        if intruder is not None:
            users.append(self._intrude(intruder, window))
        timeout_s = None if duration_s is None else duration_s + grace_s
        return await _run(users, window, timeout_s)

    async def open_loop(
        self, timed: Sequence[TimedRequest], *, duration_s: float | None = None, grace_s: float
    ) -> Window:
        """Send each request at its time. It starts then, even if the client is late."""
        window = _open(duration_s)
        sends = [self._send_at(each, window) for each in timed]
        last_s = timed[-1].at_s if timed else 0.0
        return await _run(sends, window, max(last_s, duration_s or 0.0) + grace_s)

    async def _user(self, requests: Iterator[PlannedRequest], window: Window) -> None:
        while not window.is_over and (request := next(requests, None)) is not None:
            recording = Recording(request.group, time.perf_counter())
            await self._record(request, recording, window)
            if recording.error is not None:
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    async def _intrude(self, intruder: Intruder, window: Window) -> None:
        await asyncio.sleep(intruder.delay_s)
        for request in intruder.requests:
            if window.is_over:
                return
            started_at = time.perf_counter()
            await self._record(request, Recording(request.group, started_at), window)
            await asyncio.sleep(max(1.0, started_at + intruder.every_s - time.perf_counter()))

    async def _send_at(self, timed: TimedRequest, window: Window) -> None:
        planned_at = window.started_at + timed.at_s
        await asyncio.sleep(planned_at - time.perf_counter())
        late_s = time.perf_counter() - planned_at
        recording = Recording(timed.request.group, planned_at, late_s=late_s)
        await self._record(timed.request, recording, window)

    async def _record(self, request: PlannedRequest, recording: Recording, window: Window) -> None:
        window.recordings.append(recording)
        await self._send(request, recording)
        self._on_done(recording)


def _open(duration_s: float | None) -> Window:
    now = time.perf_counter()
    return Window(now, None if duration_s is None else now + duration_s)


async def _run(work: Sequence[Awaitable[None]], window: Window, timeout_s: float | None) -> Window:
    cpu_s = time.process_time()
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
    window.wall_s = time.perf_counter() - window.started_at
    window.client_cpu_s = time.process_time() - cpu_s
    return window
