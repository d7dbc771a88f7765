"""A server's process tree: started, watched, measured and ended as one."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import aiohttp
import psutil

from benchmarks.contenders import Launch
from mesh.parent_death import ends_with_me
from mesh.supervisor import wait_for_ends

_POLL_S = 0.1
_STOP_TIMEOUT_S = 30.0
_MIB = 1 << 20


class StartFailed(Exception):
    """The server did not come up; the message holds the end of its log."""


@dataclass(frozen=True)
class Memory:
    """Resident memory of a whole process tree."""

    # Shared pages counted once, divided among those who share them.
    pss_mib: float
    # Shared pages counted for each process.
    rss_mib: float
    num_processes: int


@dataclass(frozen=True)
class RunningServer:
    """A server that answers."""

    url: str
    process: psutil.Process
    start_s: float

    def memory(self) -> Memory:
        """Measure now."""
        pss = rss = num_processes = 0
        for process in _tree(self.process):
            try:
                memory = process.memory_full_info()
            except psutil.NoSuchProcess:
                continue
            pss += memory.pss
            rss += memory.rss
            num_processes += 1
        return Memory(round(pss / _MIB, 1), round(rss / _MIB, 1), num_processes)

    def cpu_s(self) -> dict[str, float]:
        """Processor time that each process has used, by the end of its command line."""
        used: dict[str, float] = {}
        for process in _tree(self.process):
            try:
                times, command = process.cpu_times(), process.cmdline()
            except psutil.NoSuchProcess:
                continue
            name = command[-1] if command else ""
            # What it started and outlived is its own.
            own_s = times.user + times.system + times.children_user + times.children_system
            used[name] = used.get(name, 0.0) + own_s
        return used


@asynccontextmanager
async def running(
    launch: Launch, port: int, log: Path, environment: Mapping[str, str]
) -> AsyncIterator[RunningServer]:
    """Start the server and wait until it is healthy; end everything it started afterwards.

    Raises:
        StartFailed: it ended, or was not healthy in time.
    """
    url = f"http://127.0.0.1:{port}"
    started_at = perf_counter()
    child = _start(launch, log, {**environment, **launch.environment})
    try:
        await _wait_until_healthy(child, url, launch.start_timeout_s, log)
        yield RunningServer(url, psutil.Process(child.pid), perf_counter() - started_at)
    finally:
        await asyncio.to_thread(_end, child)


def _start(launch: Launch, log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        # A session of its own: whatever it starts can be ended with it.
        return subprocess.Popen(
            # A killed benchmark would leave a server that slows the next one.
            ends_with_me(launch.argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


async def _wait_until_healthy(
    child: subprocess.Popen[bytes], url: str, timeout_s: float, log: Path
) -> None:
    give_up_at = perf_counter() + timeout_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        while perf_counter() < give_up_at:
            if child.poll() is not None:
                raise StartFailed(f"ended with {child.returncode}:\n{_tail(log)}")
            if await _is_healthy(session, url):
                return
            await asyncio.sleep(_POLL_S)
    raise StartFailed(f"not healthy after {timeout_s:.0f} s:\n{_tail(log)}")


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


def _end(child: subprocess.Popen[bytes]) -> None:
    tree = _tree(psutil.Process(child.pid)) if child.poll() is None else []
    if child.poll() is None:
        # The first process knows best how to end the others.
        child.terminate()
        try:
            child.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    # Usually the whole group has ended by now.
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    # Children that made sessions of their own.
    for process in wait_for_ends(tree, timeout_s=5):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _tree(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _tail(log: Path, num_lines: int = 15) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-num_lines:])
