"""Keeps the processes of one machine's mesh running: start, watch, restart, stop."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mesh.home import Home, MeshState, ServiceRecord
from mesh.parent_death import ends_with_me

logger = logging.getLogger(__name__)

# A service whose configuration is wrong ends with this; it would again.
CONFIG_ERROR_EXIT = 2
# Starts of one service that may fail before anything of it was ever ready.
MAX_FIRST_STARTS = 3
BACKOFF_FIRST_S = 0.25
BACKOFF_LAST_S = 10.0
# A service that ran so long starts again with the first backoff.
BACKOFF_RESET_S = 30.0
PROBE_INTERVAL_S = 0.05
# Health checks in a row that a process may fail before it counts as hung. They are
# counted, not timed: a machine that was suspended must not find all of its processes guilty.
MAX_MISSES = 6
DEFAULT_HANG_TIMEOUT_S = 30.0


class StartFailed(Exception):
    """A service could not be started; the message holds the end of its log."""


@dataclass(frozen=True)
class ServiceSpec:
    """How to start one service and how to see that it is ready."""

    name: str
    role: str
    worker_id: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    address: str
    probe: Callable[[], Awaitable[bool]]
    # Whether it answers within so many seconds, and is not stuck.
    is_alive: Callable[[float], Awaitable[bool]]
    # Where it answers GET /metrics.
    metrics_address: str | None = None
    # Services of a lower stage are ready before a higher one is started.
    start_stage: int = 1
    # Services of a lower stage have ended before a higher one is stopped.
    stop_stage: int = 1


@dataclass
class _Service:
    spec: ServiceSpec
    log_path: Path
    process: asyncio.subprocess.Process | None = None
    created_at: float | None = None
    state: str = "starting"
    restarts: int = 0
    was_ready: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    watcher: asyncio.Task[None] | None = None


class Supervisor:
    """Owns the processes of a mesh from `start` to `stop`.

    A process that ends is started again, after a delay that doubles from a
    quarter of a second to ten. One that was ready and then answers nothing, or
    only that it is stuck, for `hang_timeout_s` (0: however long) is killed. The children are
    told by the kernel when the supervisor dies, however it dies.
    """

    def __init__(
        self,
        home: Home,
        specs: Sequence[ServiceSpec],
        *,
        url: str,
        grpc_address: str,
        model: str,
        control_address: str = "",
        stop_timeout_s: float = 60.0,
        hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S,
        on_change: Callable[[MeshState], None] | None = None,
    ) -> None:
        self._home = home
        self._services = [self._service(spec) for spec in specs]
        self._url = url
        self._grpc_address = grpc_address
        self._model = model
        self._control_address = control_address
        self._stop_timeout_s = stop_timeout_s
        self._check_interval_s = hang_timeout_s / MAX_MISSES
        self._on_change = on_change or (lambda _: None)
        self._ready = False
        self._pid_created_at = _created_at(psutil.Process())
        self._failed = asyncio.Event()
        self._failure: BaseException | None = None

    async def start(self, timeout_s: float) -> None:
        """Start every service and return when all are ready.

        Raises:
            StartFailed: a service cannot start, or is not ready in time.
        """
        # A disk that takes no state file is found out here, where it can still be told.
        self._home.write_state(self.state())
        for service in self._services:
            service.log_path.write_bytes(b"")
        for stage in sorted({service.spec.start_stage for service in self._services}):
            services = [s for s in self._services if s.spec.start_stage == stage]
            await self._bring_up(services, timeout_s)
        self._ready = True
        self._publish()

    async def run_until_failed(self) -> None:
        """Wait; ends only by an error in the supervisor itself, or by cancellation."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def stop(self, grace_s: float) -> None:
        """End every service, stage by stage: SIGTERM, then SIGKILL after `grace_s`."""
        await asyncio.gather(*(_stop_watching(service) for service in self._services))
        for stage in sorted({service.spec.stop_stage for service in self._services}):
            services = [s for s in self._services if s.spec.stop_stage == stage]
            await asyncio.gather(*(self._end(service, grace_s) for service in services))
        self._home.state_file.unlink(missing_ok=True)

    async def add(self, spec: ServiceSpec, timeout_s: float) -> None:
        """Start one more service and return when it is ready; StartFailed leaves nothing."""
        service = self._service(spec)
        self._services.append(service)
        try:
            await self._bring_up([service], timeout_s)
        except BaseException:
            await self.remove(spec.name, grace_s=0)
            raise

    async def remove(self, name: str, grace_s: float) -> bool:
        """End one service for good; whether it ended by itself within `grace_s`."""
        [service] = [service for service in self._services if service.spec.name == name]
        service.state = "draining"
        self._publish()
        await _stop_watching(service)
        ended = await self._end(service, grace_s)
        self._services.remove(service)
        self._publish()
        return ended

    def state(self) -> MeshState:
        return MeshState(
            pid=os.getpid(),
            pid_created_at=self._pid_created_at,
            ready=self._ready,
            url=self._url,
            grpc_address=self._grpc_address,
            model=self._model,
            control_address=self._control_address,
            stop_timeout_s=self._stop_timeout_s,
            services=tuple(_record(service) for service in self._services),
        )

    def _service(self, spec: ServiceSpec) -> _Service:
        return _Service(spec, self._home.logs / f"{spec.name}.log")

    async def _bring_up(self, services: Sequence[_Service], timeout_s: float) -> None:
        """Start services and return when all are ready; raises StartFailed."""
        for service in services:
            service.watcher = asyncio.create_task(self._watch(service))
            service.watcher.add_done_callback(self._watcher_ended)
        watchers = [service.watcher for service in services if service.watcher is not None]
        all_ready = asyncio.create_task(_all_ready(services))
        try:
            done, _ = await asyncio.wait(
                [all_ready, *watchers], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()  # a watcher ends only by failing
            if not done:
                late = [service for service in services if not service.ready.is_set()]
                raise StartFailed(
                    f"not ready after {timeout_s:.0f} s: "
                    + "; ".join(f"{service.spec.name}\n{_tail(service)}" for service in late)
                )
        finally:
            all_ready.cancel()

    def _watcher_ended(self, watcher: asyncio.Task[None]) -> None:
        error = None if watcher.cancelled() else watcher.exception()
        # What cannot start is told to whoever starts it.
        if error is not None and not isinstance(error, StartFailed):
            self._failure = error
            self._failed.set()

    async def _watch(self, service: _Service) -> None:
        """Keep one service running for as long as the supervisor does."""
        backoff_s = BACKOFF_FIRST_S
        while True:
            started = time.monotonic()
            status = await self._run_once(service)
            if not service.was_ready:
                fatal = status == CONFIG_ERROR_EXIT or service.restarts + 1 >= MAX_FIRST_STARTS
                if fatal:
                    raise StartFailed(
                        f"{service.spec.name} ended with status {status}:\n{_tail(service)}"
                    )
            if time.monotonic() - started > BACKOFF_RESET_S:
                backoff_s = BACKOFF_FIRST_S
            service.state = "restarting"
            service.restarts += 1
            self._publish()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_LAST_S)

    async def _run_once(self, service: _Service) -> int | None:
        """The status with which its process ended; None if there could be none, as where memory
        or processes are short, or the folder of the logs was taken away."""
        try:
            await self._spawn(service)
        except OSError as error:
            if not service.was_ready:
                raise
            logger.error(
                "service cannot be started",
                extra={"service_name": service.spec.name, "error": repr(error)},
            )
            return None
        tending = asyncio.create_task(self._tend(service))
        assert service.process is not None
        try:
            status = await service.process.wait()
        finally:
            tending.cancel()
        service.ready.clear()
        logger.warning("service ended", extra={"service_name": service.spec.name, "status": status})
        return status

    async def _spawn(self, service: _Service) -> None:
        with service.log_path.open("ab") as log:
            service.process = await asyncio.create_subprocess_exec(
                *ends_with_me(service.spec.argv),
                env=dict(service.spec.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                # Ctrl-C is the supervisor's to handle.
                start_new_session=True,
            )
        with contextlib.suppress(psutil.NoSuchProcess):
            service.created_at = _created_at(psutil.Process(service.process.pid))
        service.state = "starting"
        self._publish()

    async def _tend(self, service: _Service) -> None:
        """Tell when a process is ready, and end it should it hang later."""
        await self._until_ready(service)
        if self._check_interval_s == 0:
            return
        await self._until_hung(service)
        assert service.process is not None
        logger.error(
            "service hangs and is killed",
            extra={
                "service_name": service.spec.name,
                "pid": service.process.pid,
                "num_misses": MAX_MISSES,
            },
        )
        with contextlib.suppress(ProcessLookupError):
            service.process.kill()

    async def _until_hung(self, service: _Service) -> None:
        num_misses = 0
        while num_misses < MAX_MISSES:
            next_check = asyncio.create_task(asyncio.sleep(self._check_interval_s))
            is_alive = await service.spec.is_alive(self._check_interval_s)
            num_misses = 0 if is_alive else num_misses + 1
            await next_check

    async def _until_ready(self, service: _Service) -> None:
        # Another process has no event to wait for.
        while not await service.spec.probe():  # noqa: ASYNC110
            await asyncio.sleep(PROBE_INTERVAL_S)
        service.state = "running"
        service.was_ready = True
        service.ready.set()
        self._publish()

    async def _end(self, service: _Service, grace_s: float) -> bool:
        """Whether the process ended by itself."""
        process, was_killed = service.process, False
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), grace_s)
            except TimeoutError:
                logger.warning("service killed", extra={"service_name": service.spec.name})
                was_killed = True
                process.kill()
                await process.wait()
        service.state = "stopped"
        self._publish()
        return not was_killed

    def _publish(self) -> None:
        state = self.state()
        try:
            self._home.write_state(state)
        except OSError as error:
            # Services go on while the disk is full, and are stopped all the same.
            logger.warning("state not written", extra={"error": repr(error)})
        self._on_change(state)


async def _stop_watching(service: _Service) -> None:
    if service.watcher is not None:
        service.watcher.cancel()
        await asyncio.gather(service.watcher, return_exceptions=True)


async def _all_ready(services: Sequence[_Service]) -> None:
    for service in services:
        await service.ready.wait()


def clean_up(home: Home, grace_s: float = 5.0) -> list[str]:
    """End what a supervisor that was killed has left; return the names of it.

    Only for the holder of the home's lock.
    """
    state = home.read_state()
    left = [] if state is None else [s for s in state.services if find_process(s) is not None]
    processes = [process for s in left if (process := find_process(s)) is not None]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
            # One that was stopped hears that only when it goes on.
            process.send_signal(signal.SIGCONT)
    alive = wait_for_ends(processes, grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_for_ends(alive, grace_s)
    segments = home.segments()
    for segment in segments:
        segment.unlink(missing_ok=True)
    home.state_file.unlink(missing_ok=True)
    return [service.name for service in left] + [segment.name for segment in segments]


def wait_for_ends(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that have not ended by then.

    One whose status nobody has collected has ended: psutil would wait for whoever has to, which
    may be an init that takes its time.
    """
    give_up_at = time.monotonic() + timeout_s
    while True:
        alive = [process for process in processes if not _has_ended(process)]
        if not alive or time.monotonic() > give_up_at:
            return alive
        time.sleep(0.02)


def find_process(record: ServiceRecord) -> psutil.Process | None:
    """The process that `record` describes, if it still runs and the pid was not reused."""
    return _find(record.pid, record.pid_created_at)


def find_supervisor(state: MeshState) -> psutil.Process | None:
    """The supervisor that wrote `state`, if it still runs."""
    return _find(state.pid, state.pid_created_at)


def _find(pid: int | None, created_at: float | None) -> psutil.Process | None:
    if pid is None or created_at is None:
        return None
    try:
        process = psutil.Process(pid)
        same = abs(_created_at(process) - created_at) < 0.01
    except psutil.NoSuchProcess:
        return None
    return process if same and not _has_ended(process) else None


def _created_at(process: psutil.Process) -> float:
    """Since boot: the time of day is set while processes live, and with it psutil's time."""
    return float(process.create_time() - psutil.boot_time())


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _record(service: _Service) -> ServiceRecord:
    process = service.process
    alive = process is not None and process.returncode is None
    return ServiceRecord(
        name=service.spec.name,
        role=service.spec.role,
        worker_id=service.spec.worker_id,
        pid=process.pid if process is not None and alive else None,
        pid_created_at=service.created_at if alive else None,
        address=service.spec.address,
        state=service.state,
        restarts=service.restarts,
        metrics_address=service.spec.metrics_address,
    )


def _tail(service: _Service, num_bytes: int = 2000) -> str:
    return service.log_path.read_bytes()[-num_bytes:].decode(errors="replace").strip()
