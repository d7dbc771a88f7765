"""Clients that leave, in any state, leave nothing behind."""

import asyncio
import contextlib
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial

import grpc
import openai
import psutil
import pytest

from kv_transfer_svc.config import KvTransferConfig
from mesh.home import ServiceRecord
from mesh.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
)
from tests.e2e.harness import MODEL, RunningMesh
from tests.loop_clock import LoopClock

SOAK_S = float(os.environ.get("SOAK_S", "60"))
NUM_STREAMS = 32
# Whose engine has begun with the request when its client leaves.
STATES = {"asking": None, "prefilling": "prefill", "decoding": "decode"}


class Watch:
    """Asks the workers and the scheduler directly what they hold: milliseconds, not a command."""

    def __init__(self, mesh: RunningMesh) -> None:
        self._channels = contextlib.ExitStack()
        self._loads: dict[str, Callable[[], types_pb2.EngineLoad]] = {}
        self._placements: dict[str, Callable[[], int]] = {}
        for service in mesh.records():
            if service.role in ("prefill", "decode", "scheduler"):
                channel = self._channels.enter_context(grpc.insecure_channel(service.address))
            if service.role in _LOADS:
                self._loads[service.name] = partial(_LOADS[service.role], channel)
            elif service.role == "scheduler":
                self._placements[service.name] = partial(_held_by_scheduler, channel)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self._channels.close()

    def held(self) -> dict[str, int]:
        """Whatever the mesh holds that an idle one does not."""
        counts = {name: _num_held(load()) for name, load in self._loads.items()}
        counts |= {name: ask() for name, ask in self._placements.items()}
        return {name: count for name, count in counts.items() if count}

    def wait_until_running(self, role: str, timeout_s: float = 20.0) -> None:
        """Until an engine of this role computes; raises TimeoutError if none is seen to."""
        loads = [load for name, load in self._loads.items() if name.startswith(role)]
        deadline = time.monotonic() + timeout_s
        while not any(load().num_running for load in loads):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {role} worker was seen to compute")
            time.sleep(0.005)  # other processes have no event to wait for

    def wait_until_idle(self, timeout_s: float) -> dict[str, int]:
        """What is still held when nothing is any more, or `timeout_s` later."""
        deadline = time.monotonic() + timeout_s
        while (held := self.held()) and time.monotonic() < deadline:
            time.sleep(0.01)  # other processes have no event to wait for
        return held


def _prefill_load(channel: grpc.Channel) -> types_pb2.EngineLoad:
    stub = prefill_pb2_grpc.PrefillServiceStub(channel)
    return stub.GetLoad(prefill_pb2.PrefillServiceGetLoadRequest(), timeout=20).load


def _decode_load(channel: grpc.Channel) -> types_pb2.EngineLoad:
    stub = decode_pb2_grpc.DecodeServiceStub(channel)
    return stub.GetLoad(decode_pb2.DecodeServiceGetLoadRequest(), timeout=20).load


_LOADS: dict[str, Callable[[grpc.Channel], types_pb2.EngineLoad]] = {
    "prefill": _prefill_load,
    "decode": _decode_load,
}


def _held_by_scheduler(channel: grpc.Channel) -> int:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    state = stub.GetState(scheduler_pb2.GetStateRequest(), timeout=20)
    return state.num_waiting + state.num_placements


def _num_held(load: types_pb2.EngineLoad) -> int:
    used = load.num_blocks - load.num_free_blocks
    return used + load.num_leases + load.num_running + load.num_waiting


@pytest.fixture
def watch(mesh: RunningMesh) -> Iterator[Watch]:
    with Watch(mesh) as made:
        yield made


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", STATES)
async def test_a_client_that_leaves_frees_everything_within_a_second(
    watch: Watch, async_client: openai.AsyncOpenAI, state: str, stream: bool
) -> None:
    # New to every cache, also in a second try. Its one pass cannot be given up half way, and has to
    # be over well within the second where a token takes a millisecond.
    prompt = f"{uuid.uuid4()}: " + "a long prompt that takes a while to compute. " * 40
    request = asyncio.ensure_future(
        async_client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=2000,
            stream=stream,
            extra_body={"ignore_eos": True},
        )
    )
    await asyncio.sleep(0)  # it is on its way
    if (role := STATES[state]) is not None:
        await asyncio.to_thread(watch.wait_until_running, role)

    if request.done():  # its stream is open
        answer = request.result()
        assert isinstance(answer, openai.AsyncStream)
        await answer.close()
    else:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    async with LoopClock() as since_left:
        held = await asyncio.to_thread(watch.wait_until_idle, 20.0)

    assert held == {}
    assert since_left.now_s < 1.0


@pytest.mark.timeout(240)
async def test_streams_with_random_disconnects_leave_nothing_and_memory_flat(
    mesh: RunningMesh, watch: Watch, async_client: openai.AsyncOpenAI
) -> None:
    chance = random.Random(7)
    outcomes = {"finished": 0, "left": 0}

    async def keep_asking(worker: int, until: float) -> None:
        while time.monotonic() < until:
            prompt = f"{worker} {chance.random()} " + "words in a row " * chance.randrange(1, 60)
            stream = await async_client.completions.create(
                model=MODEL,
                prompt=prompt,
                max_tokens=chance.randrange(1, 60),
                stream=True,
                temperature=0.8,
            )
            leave_after = chance.choice([None, None, 0, 1, 5, 20])
            outcomes[await read(stream, leave_after)] += 1

    async def soak(seconds: float) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(keep_asking(i, until) for i in range(NUM_STREAMS)))

    await soak(SOAK_S / 3)  # caches and allocators fill
    await asyncio.to_thread(watch.wait_until_idle, 5.0)
    before = resident_bytes(mesh)
    await soak(2 * SOAK_S / 3)
    held = await asyncio.to_thread(watch.wait_until_idle, 5.0)

    assert held == {}
    assert outcomes["finished"] > 0
    assert outcomes["left"] > 0
    assert resident_bytes(mesh) < before * 1.05


async def read(stream: openai.AsyncStream[openai.types.Completion], leave_after: int | None) -> str:
    count = 0
    async with stream:
        async for _ in stream:
            count += 1
            if leave_after is not None and count > leave_after:
                return "left"
    return "finished"


def resident_bytes(mesh: RunningMesh) -> int:
    """Resident memory of all services, pages that they share counted once."""
    return sum(_pss(service) for service in mesh.records())


def _pss(service: ServiceRecord) -> int:
    return int(psutil.Process(service.pid).memory_full_info().pss)


def test_what_a_default_mesh_has_stays_under_the_bound(mesh: RunningMesh) -> None:
    """It has one decode worker, and more host memory for KV than this mesh may use."""
    default_host_memory = KvTransferConfig.model_fields["host_memory_bytes"].default
    processes = [service for service in mesh.records() if service.name != "decode-1"]

    resident = {service.name: _pss(service) for service in processes}

    assert sum(resident.values()) + default_host_memory < 2.5e9, resident
