import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from mesh.home import Home, HomeInUse, MeshState
from mesh.supervisor import (
    DEFAULT_HANG_TIMEOUT_S,
    MAX_MISSES,
    ServiceSpec,
    StartFailed,
    Supervisor,
    clean_up,
    find_process,
    find_supervisor,
)

SLEEP = "import time\nwhile True: time.sleep(60)"


def spec(
    name: str,
    code: str,
    probe: Callable[[], Awaitable[bool]] | None = None,
    start_stage: int = 1,
    stop_stage: int = 1,
    is_alive: Callable[[float], Awaitable[bool]] | None = None,
) -> ServiceSpec:
    async def ready() -> bool:
        return True

    async def always(timeout_s: float) -> bool:
        return True

    return ServiceSpec(
        name=name,
        role=name,
        worker_id=name,
        argv=(sys.executable, "-S", "-c", code),
        env=dict(os.environ),
        address="127.0.0.1:1",
        probe=probe or ready,
        is_alive=is_alive or always,
        start_stage=start_stage,
        stop_stage=stop_stage,
    )


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    made.run.mkdir()
    made.logs.mkdir()
    return made


def supervise(
    home: Home,
    *specs: ServiceSpec,
    hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S,
    on_change: Callable[[MeshState], None] | None = None,
) -> Supervisor:
    return Supervisor(
        home,
        specs,
        url="u",
        grpc_address="g",
        model="m",
        hang_timeout_s=hang_timeout_s,
        on_change=on_change,
    )


async def test_services_run_until_they_are_stopped(home: Home) -> None:
    supervisor = supervise(home, spec("a", SLEEP), spec("b", SLEEP))

    await supervisor.start(timeout_s=20)
    running = home.read_state()
    await supervisor.stop(grace_s=5)

    assert running is not None
    assert running.ready
    assert [service.state for service in running.services] == ["running", "running"]
    assert all(find_process(service) is None for service in running.services)
    assert home.read_state() is None


async def test_a_service_that_dies_is_started_again_as_a_new_process(home: Home) -> None:
    back = asyncio.Event()

    def notice(state: MeshState) -> None:
        if state.services[0].restarts == 1 and state.services[0].state == "running":
            back.set()

    supervisor = supervise(home, spec("a", SLEEP), on_change=notice)
    await supervisor.start(timeout_s=20)
    first = supervisor.state().services[0].pid
    assert first is not None

    os.kill(first, signal.SIGKILL)
    await asyncio.wait_for(back.wait(), 20)

    assert supervisor.state().services[0].pid not in (None, first)
    await supervisor.stop(grace_s=5)


async def test_a_state_file_that_cannot_be_written_ends_no_service(home: Home) -> None:
    back = asyncio.Event()

    def notice(state: MeshState) -> None:
        if state.services[0].restarts == 1 and state.services[0].state == "running":
            back.set()

    supervisor = supervise(home, spec("a", SLEEP), spec("b", SLEEP), on_change=notice)
    await supervisor.start(timeout_s=20)
    # As if the disk were full: the file cannot be written before it is put in place.
    home.state_file.with_suffix(".tmp").mkdir()
    first, other = supervisor.state().services
    assert first.pid is not None

    os.kill(first.pid, signal.SIGKILL)
    await asyncio.wait_for(back.wait(), 20)

    assert find_process(other) is not None
    second = supervisor.state().services[0]
    await supervisor.stop(grace_s=5)
    assert find_process(second) is find_process(other) is None


async def test_a_service_that_cannot_be_started_again_for_now_ends_no_other(home: Home) -> None:
    changes: asyncio.Queue[MeshState] = asyncio.Queue()

    async def until(num_restarts: int, name: str) -> None:
        async with asyncio.timeout(20):
            while True:
                first = (await changes.get()).services[0]
                if first.restarts >= num_restarts and first.state == name:
                    return

    supervisor = supervise(home, spec("a", SLEEP), spec("b", SLEEP), on_change=changes.put_nowait)
    await supervisor.start(timeout_s=20)
    running = asyncio.create_task(supervisor.run_until_failed())
    pid = supervisor.state().services[0].pid
    assert pid is not None

    away = home.logs.rename(home.path / "away")
    os.kill(pid, signal.SIGKILL)
    await until(2, "restarting")
    away.rename(home.logs)
    await until(2, "running")

    assert not running.done()
    running.cancel()
    await supervisor.stop(grace_s=5)


async def test_a_home_that_cannot_be_written_to_fails_the_start(home: Home) -> None:
    home.state_file.with_suffix(".tmp").mkdir()
    supervisor = supervise(home, spec("a", SLEEP))

    with pytest.raises(OSError, match=r"state\.tmp"):
        await supervisor.start(timeout_s=20)

    assert supervisor.state().services[0].pid is None


# Answers whoever connects, for as long as it runs.
ECHO = """
import pathlib, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
port = pathlib.Path({port!r})
part = port.with_suffix(".part")
part.write_text(str(listener.getsockname()[1]))
part.rename(port)
while True:
    connection, _ = listener.accept()
    connection.sendall(b"here")
    connection.close()
"""


@pytest.mark.timeout(60)
async def test_a_service_that_is_frozen_is_killed_and_replaced_after_some_misses(
    home: Home, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = tmp_path / "port"
    outcomes: list[bool] = []
    checked = asyncio.Event()
    states: asyncio.Queue[MeshState] = asyncio.Queue()

    async def ask(timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(port.read_text()))
                try:
                    return await reader.read() == b"here"
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False

    async def is_alive(timeout_s: float) -> bool:
        outcomes.append(await ask(timeout_s))
        checked.set()
        return outcomes[-1]

    async def until_outcomes(latest: list[bool]) -> None:
        async with asyncio.timeout(20):
            while outcomes[-len(latest) :] != latest:
                checked.clear()
                await checked.wait()

    async def is_ready() -> bool:
        return port.exists()

    async def until(is_so: Callable[[MeshState], bool]) -> MeshState:
        async with asyncio.timeout(20):
            while not is_so(state := await states.get()):
                pass
            return state

    supervisor = supervise(
        home,
        spec("a", ECHO.format(port=str(port)), is_ready, is_alive=is_alive),
        hang_timeout_s=0.6,
        on_change=states.put_nowait,
    )
    await supervisor.start(timeout_s=20)
    [frozen] = supervisor.state().services
    assert frozen.pid is not None
    # Shorter than that does not matter.
    os.kill(frozen.pid, signal.SIGSTOP)
    await until_outcomes([False, False])
    os.kill(frozen.pid, signal.SIGCONT)
    await until_outcomes([True])
    assert supervisor.state().services[0].pid == frozen.pid

    os.kill(frozen.pid, signal.SIGSTOP)
    await until(lambda state: state.services[0].restarts == 1)
    assert outcomes[-MAX_MISSES:] == [False] * MAX_MISSES
    port.unlink(missing_ok=True)
    state = await until(lambda state: state.services[0].state == "running")

    assert state.services[0].pid not in (None, frozen.pid)
    assert find_process(frozen) is None
    [told] = [one for one in caplog.records if one.message == "service hangs and is killed"]
    assert (told.service_name, told.pid) == ("a", frozen.pid)  # type: ignore[attr-defined]
    await supervisor.stop(grace_s=5)


async def test_nobody_is_asked_where_hanging_is_allowed(home: Home) -> None:
    asked: list[float] = []

    async def is_alive(timeout_s: float) -> bool:
        asked.append(timeout_s)
        return True

    supervisor = supervise(home, spec("a", SLEEP, is_alive=is_alive), hang_timeout_s=0)
    await supervisor.start(timeout_s=20)
    await supervisor.stop(grace_s=5)

    assert asked == []


async def test_a_service_that_ignores_sigterm_is_killed(home: Home, tmp_path: Path) -> None:
    marker = tmp_path / "ignoring"
    code = (
        "import signal, pathlib\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(marker)!r}).touch()\n{SLEEP}"
    )

    async def ignoring() -> bool:
        return marker.exists()

    supervisor = supervise(home, spec("a", code, ignoring))
    await supervisor.start(timeout_s=20)
    record = supervisor.state().services[0]

    await supervisor.stop(grace_s=0.2)

    assert find_process(record) is None


async def test_a_bad_configuration_fails_the_start_at_once_with_the_end_of_the_log(
    home: Home,
) -> None:
    async def never() -> bool:
        return False

    code = "import sys\nprint('no_such_setting: unknown')\nsys.exit(2)"
    supervisor = supervise(home, spec("a", code, never))

    with pytest.raises(StartFailed, match="a ended with status 2:\nno_such_setting: unknown"):
        await supervisor.start(timeout_s=60)
    await supervisor.stop(grace_s=1)


async def test_a_later_stage_waits_for_an_earlier_one(home: Home, tmp_path: Path) -> None:
    first_ready = asyncio.Event()
    order: list[str] = []

    async def first() -> bool:
        order.append("first")
        first_ready.set()
        return True

    async def second() -> bool:
        order.append("second")
        return first_ready.is_set()

    supervisor = supervise(
        home, spec("b", SLEEP, second, start_stage=1), spec("a", SLEEP, first, 0)
    )
    await supervisor.start(timeout_s=20)
    await supervisor.stop(grace_s=5)

    assert order == ["first", "second"]


async def test_services_stop_stage_by_stage(home: Home) -> None:
    ended: list[str] = []

    def notice(state: MeshState) -> None:
        ended.extend(
            service.name
            for service in state.services
            if service.state == "stopped" and service.name not in ended
        )

    last, first = spec("last", SLEEP, stop_stage=1), spec("first", SLEEP, stop_stage=0)
    supervisor = supervise(home, last, first, on_change=notice)
    await supervisor.start(timeout_s=20)

    await supervisor.stop(grace_s=5)

    assert ended == ["first", "last"]


async def test_a_service_that_is_removed_ends_and_is_not_started_again(home: Home) -> None:
    supervisor = supervise(home, spec("a", SLEEP), spec("b", SLEEP))
    await supervisor.start(timeout_s=20)
    record = supervisor.state().services[0]

    ended = await supervisor.remove("a", grace_s=5)

    assert ended
    assert find_process(record) is None
    assert [service.name for service in supervisor.state().services] == ["b"]
    await supervisor.stop(grace_s=5)


async def test_a_service_that_is_added_is_watched_like_the_others(home: Home) -> None:
    back = asyncio.Event()

    def notice(state: MeshState) -> None:
        if any(s.name == "b" and s.restarts == 1 and s.state == "running" for s in state.services):
            back.set()

    supervisor = supervise(home, spec("a", SLEEP), on_change=notice)
    await supervisor.start(timeout_s=20)

    await supervisor.add(spec("b", SLEEP), timeout_s=20)
    added = supervisor.state().services[1]
    assert added.pid is not None
    os.kill(added.pid, signal.SIGKILL)

    await asyncio.wait_for(back.wait(), 20)
    await supervisor.stop(grace_s=5)


async def test_a_service_that_cannot_be_added_leaves_the_others_alone(home: Home) -> None:
    async def never() -> bool:
        return False

    supervisor = supervise(home, spec("a", SLEEP))
    await supervisor.start(timeout_s=20)
    running = asyncio.create_task(supervisor.run_until_failed())

    with pytest.raises(StartFailed, match="b ended with status 2"):
        await supervisor.add(spec("b", "import sys; sys.exit(2)", never), timeout_s=20)

    assert not running.done()
    assert [service.name for service in supervisor.state().services] == ["a"]
    running.cancel()
    await supervisor.stop(grace_s=5)


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_what_a_killed_supervisor_left_is_cleaned_up(home: Home, is_stopped: bool) -> None:
    supervisor = supervise(home, spec("a", SLEEP))
    await supervisor.start(timeout_s=20)
    record = supervisor.state().services[0]
    segment = Path("/dev/shm") / f"{home.segment_prefix}left"
    segment.write_bytes(b"x")
    for service in supervisor._services:  # the supervisor is gone, its children are not
        assert service.watcher is not None
        service.watcher.cancel()
    process = find_process(record)
    assert process is not None
    if is_stopped:
        process.suspend()

    async with asyncio.timeout(30):
        # A signal is enough: it does not come to the SIGKILL.
        left = await asyncio.to_thread(clean_up, home, 60)

    assert left == ["a", segment.name]
    assert find_process(record) is None
    assert not segment.exists()
    assert home.read_state() is None


def test_children_end_with_a_killed_supervisor(home: Home, tmp_path: Path) -> None:
    script = tmp_path / "supervise.py"
    script.write_text(
        "import asyncio, pathlib, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_supervisor import SLEEP, Home, spec, supervise\n"
        "async def main():\n"
        f"    home = Home(pathlib.Path({str(home.path)!r}))\n"
        "    await supervise(home, spec('a', SLEEP)).start(20)\n"
        "    print('up', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        state = home.read_state()
        assert state is not None
        child = find_process(state.services[0])
        assert child is not None

        process.kill()

        _, alive = psutil.wait_procs([child], timeout=10)
        assert not alive


@pytest.mark.skipif(sys.platform != "linux", reason="psutil adds the time of boot itself")
async def test_processes_are_found_after_the_clock_was_set(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervise(home, spec("a", SLEEP))
    await supervisor.start(timeout_s=20)
    booted_at = psutil.boot_time()

    # Of a machine that is told the time of day, the time since boot stays as it is.
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted_at + 3)
    state = home.read_state()

    assert state is not None
    assert find_supervisor(state) is not None
    assert find_process(state.services[0]) is not None
    await supervisor.stop(grace_s=5)


def test_one_home_has_one_supervisor(home: Home) -> None:
    with home.lock(), pytest.raises(HomeInUse, match="already runs in"), home.lock():
        pass

    with home.lock():  # free again
        assert home.run.is_dir()


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "{}", '{"services": [{"name": "a", "colour": "red"}]}', "\x00\x00"],
)
def test_a_state_file_that_cannot_be_read_is_in_nobodys_way(home: Home, text: str) -> None:
    home.state_file.write_text(text)

    assert home.read_state() is None
    assert clean_up(home) == []
    assert not home.state_file.exists()


def test_homes_have_different_segment_prefixes(tmp_path: Path) -> None:
    assert Home(tmp_path / "a").segment_prefix != Home(tmp_path / "b").segment_prefix
