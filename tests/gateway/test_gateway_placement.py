"""What the scheduler hears of a placement's life."""

import asyncio
from typing import Any

import httpx
import pytest

from mesh.errors import WorkerUnavailable
from mesh.v1 import types_pb2
from tests.gateway.fake_workers import Fault
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, completion

CHAT = "/v1/chat/completions"


def stages(timings: object) -> set[int]:
    return {timing.stage for timing in timings}  # type: ignore[attr-defined]


@pytest.mark.parametrize("local", [False, True])
async def test_scheduler_is_told_of_the_first_token_and_of_the_end_with_all_times(
    http: httpx.AsyncClient, mesh: FakeMesh, local: bool
) -> None:
    mesh.scheduler.local = local

    answer = await http.post(CHAT, json=chat())
    await mesh.quiet()

    assert answer.status_code == 200
    first, last = mesh.scheduler.told
    assert first.HasField("prefill_done")
    assert last.HasField("finished")
    assert last.finished.num_output_tokens == answer.json()["usage"]["completion_tokens"]
    assert types_pb2.STAGE_DECODE_STEPS in stages(last.finished.timings)
    if not local:
        assert types_pb2.STAGE_PREFILL_COMPUTE in stages(first.prefill_done.timings)


async def test_times_of_a_resumed_request_are_not_told_as_those_of_one_placement(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.decode.faults = [Fault(after=2, error=WorkerUnavailable("draining"))]

    answer = await http.post(CHAT, json=chat())
    await mesh.quiet()

    assert answer.status_code == 200
    kinds = [message.WhichOneof("event") for message in mesh.scheduler.told]
    assert kinds == ["prefill_done", "failed", "prefill_done", "finished"]
    assert not mesh.scheduler.told[-1].finished.timings


async def test_placement_is_renewed_for_as_long_as_its_request_runs(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.scheduler.lease_ms = 30
    mesh.prefill.finish_gate.clear()
    asking = asyncio.create_task(http.post(CHAT, json=chat()))
    await asyncio.wait_for(mesh.scheduler.was_renewed.wait(), 20)
    mesh.prefill.finish_gate.set()

    assert (await asking).status_code == 200
    await mesh.quiet()
    kinds = [message.WhichOneof("event") for message in mesh.scheduler.told]
    assert kinds[0] == "renew"
    assert kinds[-1] == "finished"


@pytest.mark.parametrize(
    ("more", "priority_class"),
    [
        ({}, types_pb2.PRIORITY_CLASS_ONLINE),
        ({"service_tier": None}, types_pb2.PRIORITY_CLASS_ONLINE),
        ({"service_tier": "auto"}, types_pb2.PRIORITY_CLASS_ONLINE),
        ({"service_tier": "default"}, types_pb2.PRIORITY_CLASS_ONLINE),
        ({"service_tier": "flex", "priority": 3}, types_pb2.PRIORITY_CLASS_OFFLINE),
    ],
)
async def test_flex_requests_give_way_to_the_others(
    http: httpx.AsyncClient, mesh: FakeMesh, more: dict[str, Any], priority_class: int
) -> None:
    answer = await http.post("/v1/completions", json=completion(**more))

    assert answer.status_code == 200
    [admit] = mesh.scheduler.admits
    assert admit.priority_class == priority_class
    assert admit.priority == more.get("priority", 0)


async def test_scheduler_learns_within_what_time_the_first_token_is_wanted(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    headers = {"x-pdmesh-ttft-objective-ms": "750"}

    assert (await http.post(CHAT, json=chat(), headers=headers)).status_code == 200
    assert (await http.post(CHAT, json=chat())).status_code == 200

    assert [admit.ttft_objective_ms for admit in mesh.scheduler.admits] == [750, 0]


@pytest.mark.parametrize(
    "given", ["", "0", "-1", "1.5", "soon", "4294967296", "9" * 40, "00000000019" + "9" * 9]
)
async def test_ttft_objective_that_is_no_time_is_refused(
    http: httpx.AsyncClient, mesh: FakeMesh, given: str
) -> None:
    headers = {"x-pdmesh-ttft-objective-ms": given}

    answer = await http.post(CHAT, json=chat(), headers=headers)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-pdmesh-ttft-objective-ms"
    assert not mesh.scheduler.admits
