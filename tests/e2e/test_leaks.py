"""Clients that leave, in any state, leave nothing behind."""

import asyncio
import os
import random
import time
from typing import Any

import openai
import psutil
import pytest

from tests.e2e.harness import MODEL, RunningMesh

SOAK_S = float(os.environ.get("SOAK_S", "60"))
NUM_STREAMS = 32
STATES = {"queued": 0.0, "prefilling": 0.15, "decoding": 1.0}


def busy(mesh: RunningMesh) -> dict[str, Any]:
    """Whatever a mesh holds that an idle one does not."""
    held: dict[str, Any] = {}
    for service in mesh.status()["services"]:
        engine = service["engine"]
        if engine is not None:
            used = engine["blocks_total"] - engine["blocks_free"]
            held[service["name"]] = used + engine["leases"] + engine["running"] + engine["waiting"]
        if service["name"].startswith("scheduler"):
            held[service["name"]] = service["placements"] + service["waiting"]
    return {name: number for name, number in held.items() if number}


def wait_until_idle(mesh: RunningMesh, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while held := busy(mesh):
        if time.monotonic() > deadline:
            break
    return held


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", STATES)
async def test_a_client_that_leaves_frees_everything_within_a_second(
    mesh: RunningMesh, async_client: openai.AsyncOpenAI, state: str, stream: bool
) -> None:
    prompt = f"{state} {stream}: " + "a long prompt that takes a while to compute. " * 60
    request = asyncio.ensure_future(
        async_client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=2000,
            stream=stream,
            extra_body={"ignore_eos": True},
        )
    )
    await asyncio.sleep(STATES[state])

    if request.done():  # its stream is open
        answer = request.result()
        assert isinstance(answer, openai.AsyncStream)
        await answer.close()
    else:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    left = time.monotonic()
    held = await asyncio.to_thread(wait_until_idle, mesh, 5.0)

    assert held == {}
    # The status command itself takes most of a second to start.
    assert time.monotonic() - left < 3.0


@pytest.mark.timeout(240)
async def test_streams_with_random_disconnects_leave_nothing_and_memory_flat(
    mesh: RunningMesh, async_client: openai.AsyncOpenAI
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
    await asyncio.to_thread(wait_until_idle, mesh, 5.0)
    before = resident_bytes(mesh)
    await soak(2 * SOAK_S / 3)
    held = await asyncio.to_thread(wait_until_idle, mesh, 5.0)

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
    pids = [service["pid"] for service in mesh.status()["services"]]
    return sum(int(psutil.Process(pid).memory_full_info().pss) for pid in pids)


def test_all_processes_together_stay_under_the_bound(mesh: RunningMesh) -> None:
    workers = len(mesh.services("prefill")) + len(mesh.services("decode"))

    assert workers == 3
    # The bound of 2.5 GB is for the default of two workers.
    assert resident_bytes(mesh) < 2.5e9 * workers / 2
