"""What the scheduler hears of a placement's life."""

import httpx
import pytest

from mesh.errors import WorkerUnavailable
from mesh.v1 import types_pb2
from tests.gateway.fakes import FakeMesh, Fault
from tests.gateway.running import chat

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
    assert kinds == ["prefill_done", "prefill_done", "finished"]
    assert not mesh.scheduler.told[-1].finished.timings
