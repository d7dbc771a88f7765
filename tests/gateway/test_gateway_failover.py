"""Where a choice goes when a worker fails it, how often, and who hears of it."""

import asyncio

import grpc
import httpx
import pytest

from mesh.errors import Draining, MeshError, QueueFull, WorkerUnavailable
from mesh.server import MeshServer
from mesh.v1 import scheduler_pb2, scheduler_pb2_grpc, tokenizer_pb2_grpc
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.fake_tokenizer import FakeTokenizer
from tests.gateway.fake_workers import Fault
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, events, eventually, run_gateway, text_of

CHAT = "/v1/chat/completions"
HELLO = "Hello, world!"


async def ask(http: httpx.AsyncClient) -> str:
    payloads = await events(http, CHAT, chat(stream=True))
    assert payloads[-1] == "[DONE]"
    return text_of(payloads)


async def test_a_long_answer_may_move_as_often_as_workers_are_drained(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    for decode in mesh.decodes:
        decode.faults = [Fault(after=1, error=Draining("stopping"), num_calls=3)]

    assert await ask(http) == HELLO
    assert len(mesh.scheduler.admits) > 6
    assert not any(told.HasField("failed") for told in mesh.scheduler.told)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault(after=2, error=WorkerUnavailable("sick")), scheduler_pb2.WORKER_FAILURE_FAULTY),
        (Fault(after=2, status=grpc.StatusCode.INTERNAL), scheduler_pb2.WORKER_FAILURE_LOST),
        (Fault(after=2, error=QueueFull("busy")), None),
    ],
)
async def test_the_scheduler_hears_which_worker_failed_and_how(
    http: httpx.AsyncClient,
    mesh: FakeMesh,
    fault: Fault,
    expected: "scheduler_pb2.WorkerFailure.ValueType | None",
) -> None:
    mesh.decode.faults = [fault]

    assert await ask(http) == HELLO
    await mesh.quiet()

    told = [one.failed for one in mesh.scheduler.told if one.HasField("failed")]
    assert [(one.worker_id, one.failure) for one in told] == (
        [] if expected is None else [("decode-0", expected)]
    )


async def test_a_killed_prefill_worker_is_reported_as_lost() -> None:
    async with FakeMesh(num_prefill=2) as mesh, run_gateway(mesh) as gateway:
        mesh.prefill.start_gate = asyncio.Event()
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            asking = asyncio.create_task(ask(http))
            await mesh.prefill.was_active.wait()
            await mesh.kill("prefill-0")
            assert await asking == HELLO

        [told] = [one.failed for one in mesh.scheduler.told if one.HasField("failed")]
        assert told.worker_id == "prefill-0"
        assert told.failure == scheduler_pb2.WORKER_FAILURE_LOST


async def test_whoever_has_begun_waits_for_a_worker_and_no_longer_than_it_should() -> None:
    async with (
        FakeMesh(num_decode=1) as mesh,
        run_gateway(mesh, failover_wait_s=0.3) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
    ):
        mesh.decode.faults = [Fault(after=2, error=WorkerUnavailable("restarting"))]
        mesh.decode.steps = steps = asyncio.Semaphore(0)
        asking = asyncio.create_task(events(http, CHAT, chat(stream=True)))
        await mesh.decode.was_active.wait()
        mesh.scheduler.error = WorkerUnavailable("no decode worker is alive")
        for _ in HELLO:
            steps.release()

        payloads = await asking

    assert text_of(payloads) == "Hel"
    assert payloads[-2]["error"]["code"] == "server_is_overloaded"
    assert payloads[-1] == "[DONE]"


async def test_a_newcomer_is_told_at_once_that_nobody_is_there(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.scheduler.error = WorkerUnavailable("no decode worker is alive")

    response = await http.post(CHAT, json=chat())

    assert response.status_code == 503
    assert len(mesh.scheduler.admits) == 1


class Second:
    """Another scheduler or tokenizer of a mesh, on its own server."""

    def __init__(self, kind: str, servicer: FakeScheduler | FakeTokenizer) -> None:
        self.server = MeshServer()
        if isinstance(servicer, FakeScheduler):
            add = scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server
            self.server.add(add, servicer, kind)
        else:
            self.server.add(
                tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server, servicer, kind
            )


@pytest.mark.parametrize("error", [Draining("the scheduler is draining"), None])
async def test_a_request_in_the_queue_of_a_scheduler_that_ends_goes_to_another(
    error: MeshError | None,
) -> None:
    async with FakeMesh() as mesh:
        other = FakeScheduler([*mesh.prefills], [*mesh.decodes])
        second = Second("mesh.v1.SchedulerService", other)
        addresses = [mesh.scheduler_address, await second.server.start()]
        for scheduler in (mesh.scheduler, other):
            scheduler.gate = asyncio.Event()
        async with (
            run_gateway(mesh, scheduler_addresses=addresses) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
        ):
            asking = asyncio.create_task(ask(http))
            await eventually(lambda: mesh.scheduler.admits or other.admits)
            first, left = (
                (mesh.scheduler, other) if mesh.scheduler.admits else (other, mesh.scheduler)
            )
            assert left.gate is not None
            left.gate.set()
            if error is not None:
                first.error = error
                assert first.gate is not None
                first.gate.set()
            elif first is other:
                await second.server.stop(0)
            else:
                await mesh.kill("scheduler")
            assert await asking == HELLO
            assert len(left.admits) == 1
        await second.server.stop(0)


async def test_a_prompt_in_the_hands_of_a_tokenizer_that_dies_is_encoded_by_another() -> None:
    async with FakeMesh() as mesh:
        mesh.tokenizer.encode_gate, gate = asyncio.Event(), asyncio.Event()
        other = FakeTokenizer(encode_gate=gate)
        second = Second("mesh.v1.TokenizerService", other)
        addresses = [mesh.tokenizer_address, await second.server.start()]
        async with (
            run_gateway(mesh, tokenizer_addresses=addresses) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
        ):
            asking = asyncio.create_task(ask(http))
            await eventually(lambda: mesh.tokenizer.num_encodes or other.num_encodes)
            if mesh.tokenizer.num_encodes:
                gate.set()
                await mesh.kill("tokenizer")
            else:
                mesh.tokenizer.encode_gate.set()
                await second.server.stop(0)
            assert await asking == HELLO
        await second.server.stop(0)


async def test_without_any_scheduler_a_request_fails_after_a_bounded_wait() -> None:
    async with FakeMesh() as mesh, run_gateway(mesh, reconnect_wait_s=0.2) as gateway:
        await mesh.kill("scheduler")
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            response = await http.post(CHAT, json=chat())

    assert response.status_code == 503
