"""SchedulerService over the wire: placements live exactly as long as their calls."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mesh import metrics, telemetry
from mesh.client import connect, mesh_errors
from mesh.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    WorkerUnavailable,
)
from mesh.server import MeshServer
from mesh.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from scheduler_svc.admission import QueueSettings
from scheduler_svc.app import SERVICE_NAME
from scheduler_svc.breakers import BreakerSettings
from scheduler_svc.cluster import Cluster
from scheduler_svc.objectives import Objectives
from scheduler_svc.placement import PlacementSettings
from scheduler_svc.prefix_lookup import PrefixQuery
from scheduler_svc.scheduler import Scheduler
from scheduler_svc.service import SchedulerServicer
from scheduler_svc.workers import Hits, PrefixHit
from tests.paper_workers import PaperRegistry, registered

PlaceRequest = scheduler_pb2.PlaceRequest
PREFILL_DONE = PlaceRequest(prefill_done=PlaceRequest.PrefillDone())
RENEW = PlaceRequest(renew=PlaceRequest.Renew())


class PaperLookup:
    """Answers with `answer`, once `answering` is set."""

    def __init__(self) -> None:
        self.answer: Hits = {}
        self.answering = asyncio.Event()
        self.answering.set()
        self.asked = asyncio.Event()
        self.error: BaseException | None = None
        self.queries: list[PrefixQuery] = []
        self.placements: list[list[str]] = []
        self.knows_all = True

    async def hits(self, query: PrefixQuery) -> Hits:
        self.queries.append(query)
        self.asked.set()
        await self.answering.wait()
        if self.error is not None:
            raise self.error
        return self.answer

    def latest(self, query: PrefixQuery, known: Hits) -> Hits:
        return known

    def placed(self, query: PrefixQuery, holder_ids: Collection[str]) -> None:
        self.placements.append(list(holder_ids))

    def is_complete(self, model: str) -> bool:
        return self.knows_all


@dataclass
class Mesh:
    """A served scheduler and the strings behind it."""

    stub: Any
    scheduler: Scheduler
    registry: PaperRegistry
    cluster: Cluster
    lookup: PaperLookup

    async def state(self) -> scheduler_pb2.GetStateResponse:
        state: scheduler_pb2.GetStateResponse = await self.stub.GetState(
            scheduler_pb2.GetStateRequest()
        )
        return state

    async def until(self, num_waiting: int = 0, num_placements: int = 0) -> None:
        """Until the scheduler holds just this; the test's timeout is the bound."""
        async with asyncio.timeout(5):
            while True:
                state = await self.state()
                if (state.num_waiting, state.num_placements) == (num_waiting, num_placements):
                    return

    async def num_placements(self) -> dict[str, int]:
        return {worker.worker_id: worker.num_placements for worker in (await self.state()).workers}


Serve = Callable[..., Awaitable[Mesh]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(
            *workers: Any,
            has_workers: bool = True,
            max_num_waiting: int = 256,
            max_wait_s: float = 30,
            objectives: Objectives | None = None,
            quantum: int = 2048,
            lease_s: float = 15.0,
            breaker_first_open_s: float = 1.0,
            **settings: Any,
        ) -> Mesh:
            usual = (registered("p0", "prefill"), registered("d0")) if has_workers else ()
            registry = PaperRegistry(*(workers or usual))
            cluster, lookup = Cluster(registry), PaperLookup()
            scheduler = Scheduler(
                cluster,
                lookup,
                PlacementSettings(**settings),
                QueueSettings(max_num_waiting=max_num_waiting, quantum=quantum),
                objectives,
                breakers=BreakerSettings(first_open_s=breaker_first_open_s),
            )
            await cluster.refresh()
            server = MeshServer("127.0.0.1:0")
            server.add(
                scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
                SchedulerServicer(scheduler, max_wait_s, lease_s=lease_s),
                SERVICE_NAME,
            )
            address = await server.start()
            stack.push_async_callback(server.stop, 0)
            channel = connect(address)
            stack.push_async_callback(channel.close)
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            return Mesh(stub, scheduler, registry, cluster, lookup)

        yield start


def admit(num_prompt_tokens: int = 160, max_tokens: int = 16, **changes: Any) -> Any:
    fields = {"request_id": "r1", "model": "smol", **changes}
    return PlaceRequest(
        admit=PlaceRequest.Admit(
            prompt_token_ids=range(num_prompt_tokens), max_tokens=max_tokens, **fields
        )
    )


class Call:
    """One Place call, opened like the gateway does."""

    def __init__(self, mesh: Mesh, request: Any = None, **options: Any) -> None:
        self._request = request or admit()
        self._call = mesh.stub.Place(**options)

    async def placement(self) -> scheduler_pb2.Placement:
        with mesh_errors():
            await self._call.write(self._request)
            response = await self._call.read()
            if response is grpc.aio.EOF:
                # The status is that of the call.
                raise grpc.aio.AioRpcError(
                    await self._call.code(),
                    await self._call.initial_metadata(),
                    await self._call.trailing_metadata(),
                    await self._call.details(),
                )
            placement: scheduler_pb2.Placement = response.placement
            return placement

    async def prefill_done(self) -> None:
        await self._call.write(PREFILL_DONE)

    async def tell(self, message: Any) -> None:
        await self._call.write(message)

    async def end(self) -> None:
        """Until the scheduler has ended the call; raises its error."""
        with mesh_errors():
            await self._call.read()

    def cancel(self) -> None:
        self._call.cancel()

    async def close(self) -> None:
        await self._call.done_writing()
        assert await self._call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("tiers", "knows_all", "num_tokens"),
    [({}, True, 0), ({"127.0.0.1:9": PrefixHit(0, 2)}, True, 32), ({}, False, None)],
)
async def test_placement_says_how_much_colder_tiers_have(
    serve: Serve, tiers: Hits, knows_all: bool, num_tokens: int | None
) -> None:
    mesh = await serve()
    # What a worker holds itself may be gone when the request comes: only tiers count.
    mesh.lookup.answer = {"p0@1": PrefixHit(4), **tiers}
    mesh.lookup.knows_all = knows_all
    call = Call(mesh)

    placement = await call.placement()

    for worker in (placement.prefill, placement.decode):
        assert worker.HasField("num_tiered_tokens") is (num_tokens is not None)
        assert worker.num_tiered_tokens == (num_tokens or 0)
    await call.close()


async def test_placement_names_both_workers_and_why(serve: Serve) -> None:
    mesh = await serve()
    mesh.lookup.answer = {"p0@1": PrefixHit(4), "d0@1": PrefixHit(2)}
    call = Call(mesh)

    placement = await call.placement()

    assert placement.mode == scheduler_pb2.PLACEMENT_MODE_DISAGGREGATED
    assert placement.reason == "prefill_remote"
    assert placement.placement_id
    assert (placement.prefill.worker_id, placement.prefill.address) == ("p0", "p0:1")
    assert (placement.prefill.num_cached_tokens, placement.decode.num_cached_tokens) == (64, 32)
    assert placement.decode.worker_id == "d0"
    assert [timing.stage for timing in placement.timings] == [types_pb2.STAGE_QUEUE]
    assert 0 < placement.timings[0].duration_ms < 5000
    await call.close()


async def test_local_placement_has_no_prefill_worker(serve: Serve) -> None:
    mesh = await serve()
    call = Call(mesh, admit(10))

    placement = await call.placement()

    assert placement.mode == scheduler_pb2.PLACEMENT_MODE_LOCAL
    assert placement.reason == "isl_bounding"
    assert not placement.HasField("prefill")
    await call.close()


async def test_lookup_gets_the_prompt_its_salt_and_the_layouts_of_the_model(serve: Serve) -> None:
    mesh = await serve(
        registered("d0"),
        registered("d1", layout_fingerprint="f2", block_size=32),
        registered("d2", layout_fingerprint="f3", model="other"),
    )
    call = Call(mesh, admit(40, cache_salt="tenant"))

    await call.placement()

    (query,) = mesh.lookup.queries
    assert (query.model, list(query.token_ids), query.cache_salt) == (
        "smol",
        [*range(40)],
        "tenant",
    )
    assert {layout.layout_fingerprint for layout in query.layouts} == {"f1", "f2"}
    await call.close()


@pytest.mark.parametrize("end", ["close", "cancel"])
async def test_placement_is_held_while_the_call_is_open(serve: Serve, end: str) -> None:
    mesh = await serve()
    call = Call(mesh)
    await call.placement()
    assert (await mesh.state()).num_placements == 1
    assert await mesh.num_placements() == {"p0": 1, "d0": 1}

    if end == "close":
        await call.close()
    else:
        call.cancel()
    await mesh.until(num_placements=0)

    assert await mesh.num_placements() == {"p0": 0, "d0": 0}


async def test_first_token_moves_the_charge_to_the_decode_worker(serve: Serve) -> None:
    mesh = await serve(registered("p0", "prefill"), registered("d0"), registered("d1"))
    mesh.registry.workers.pop()
    call = Call(mesh)
    decode = (await call.placement()).decode.worker_id

    await call.prefill_done()
    async with asyncio.timeout(5):
        while (await mesh.num_placements())["p0"]:
            pass

    assert (await mesh.num_placements())[decode] == 1
    await call.close()


async def test_first_token_makes_room_for_the_next_prompt(serve: Serve) -> None:
    mesh = await serve(
        registered("p0", "prefill"), registered("d0"), registered("d1"), max_num_seqs=1
    )
    first, second = Call(mesh), Call(mesh)
    await first.placement()
    waiting = asyncio.create_task(second.placement())
    await mesh.until(num_waiting=1, num_placements=1)

    await first.prefill_done()

    assert (await asyncio.wait_for(waiting, 5)).prefill.worker_id == "p0"
    await first.close()
    await second.close()


async def test_queued_request_is_placed_when_another_one_ends(serve: Serve) -> None:
    mesh = await serve(max_num_seqs=1)
    first, second = Call(mesh), Call(mesh)
    await first.placement()
    waiting = asyncio.create_task(second.placement())
    await mesh.until(num_waiting=1, num_placements=1)

    await first.close()

    placement = await asyncio.wait_for(waiting, 5)
    assert placement.timings[0].duration_ms > 0
    await second.close()


async def test_queued_request_is_placed_when_a_worker_joins(serve: Serve) -> None:
    mesh = await serve(registered("d0"), max_num_seqs=1)
    first, second = Call(mesh), Call(mesh)
    await first.placement()
    waiting = asyncio.create_task(second.placement())
    await mesh.until(num_waiting=1, num_placements=1)

    mesh.registry.workers.append(registered("d1"))
    await mesh.cluster.refresh()

    assert (await asyncio.wait_for(waiting, 5)).decode.worker_id == "d1"
    await first.close()
    await second.close()


async def test_queued_request_is_told_when_its_last_worker_dies(serve: Serve) -> None:
    mesh = await serve(registered("d0"), registered("other", model="other"), max_num_seqs=1)
    first, second = Call(mesh), Call(mesh)
    await first.placement()
    waiting = asyncio.create_task(second.placement())
    await mesh.until(num_waiting=1, num_placements=1)

    mesh.registry.workers.pop(0)
    await mesh.cluster.refresh()

    with pytest.raises(WorkerUnavailable):
        await waiting
    await first.close()


async def test_cancelling_a_queued_request_takes_it_out_of_the_queue(serve: Serve) -> None:
    mesh = await serve(max_num_seqs=1)
    first, second = Call(mesh), Call(mesh)
    await first.placement()
    waiting = asyncio.create_task(second.placement())
    await mesh.until(num_waiting=1, num_placements=1)

    second.cancel()
    await mesh.until(num_waiting=0, num_placements=1)

    await asyncio.wait([waiting])
    await first.close()
    await mesh.until()


async def test_cancelling_during_the_lookup_leaves_nothing(serve: Serve) -> None:
    mesh = await serve()
    mesh.lookup.answering.clear()
    call = Call(mesh)
    asking = asyncio.create_task(call.placement())
    await asyncio.wait_for(mesh.lookup.asked.wait(), 5)

    call.cancel()
    await asyncio.wait([asking])
    mesh.lookup.answering.set()

    await mesh.until()
    assert await mesh.num_placements() == {"p0": 0, "d0": 0}


async def test_caller_that_sends_everything_at_once_is_placed_too(serve: Serve) -> None:
    # As grpcurl does: it closes its side after the last message.
    mesh = await serve()

    responses = [one async for one in mesh.stub.Place(iter([admit(), PREFILL_DONE]))]

    assert len(responses) == 1
    await mesh.until()


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        (admit(1000, 25), ContextLengthExceeded, "1024"),
        (admit(model="nobody"), ModelNotFound, "nobody"),
        (admit(excluded_worker_ids=["d0"]), WorkerUnavailable, "decode"),
        (admit(0), InvalidRequest, "prompt_token_ids"),
        (admit(10, 0), InvalidRequest, "max_tokens"),
        (PREFILL_DONE, InvalidRequest, "first message"),
        (PlaceRequest(), InvalidRequest, "first message"),
    ],
)
async def test_request_that_cannot_be_placed_gets_its_own_error(
    serve: Serve, request_: Any, error: type[Exception], text: str
) -> None:
    mesh = await serve()

    with pytest.raises(error, match=text) as caught:
        await Call(mesh, request_).placement()

    assert type(caught.value) is error
    await mesh.until()


async def test_mesh_without_workers_is_unavailable_with_a_delay(serve: Serve) -> None:
    mesh = await serve(has_workers=False)

    with pytest.raises(WorkerUnavailable) as caught:
        await Call(mesh).placement()

    assert caught.value.retry_after_s is not None


async def test_placement_whose_caller_hangs_is_taken_back_when_its_lease_ends(
    serve: Serve,
) -> None:
    # KV-16: its connection lives, and it never calls the prefill worker.
    mesh = await serve(lease_s=0.2)
    call = Call(mesh)

    placement = await call.placement()
    assert placement.lease_ms == 200
    await mesh.until(num_placements=1)
    await mesh.until(num_placements=0)

    assert await mesh.num_placements() == {"d0": 0, "p0": 0}
    with pytest.raises(DeadlineExceeded, match="nothing was heard of the placement"):
        await call.end()


async def test_placement_that_is_renewed_outlives_its_lease(serve: Serve) -> None:
    mesh = await serve(lease_s=0.2)
    call = Call(mesh)
    await call.placement()

    clock = asyncio.get_running_loop().time
    until = clock() + 0.5
    while clock() < until:
        await call.tell(RENEW)
        assert (await mesh.state()).num_placements == 1

    await mesh.until(num_placements=0)


async def test_second_admit_ends_the_call_and_the_placement(serve: Serve) -> None:
    mesh = await serve()
    call = Call(mesh)
    await call.placement()

    with pytest.raises(InvalidRequest, match="once, before all else"):
        await call.placement()

    await mesh.until()


async def test_full_queue_is_refused_with_a_delay(serve: Serve) -> None:
    mesh = await serve(max_num_seqs=1, max_num_waiting=1)
    first, second = Call(mesh), Call(mesh)
    await first.placement()
    waiting = asyncio.create_task(second.placement())
    await mesh.until(num_waiting=1, num_placements=1)

    with pytest.raises(QueueFull) as caught:
        await Call(mesh).placement()

    assert caught.value.retry_after_s is not None
    await first.close()
    await waiting
    await second.close()


async def test_wait_ends_with_the_callers_deadline(serve: Serve) -> None:
    # GR-06
    mesh = await serve(max_num_seqs=1)
    first = Call(mesh)
    await first.placement()

    with pytest.raises(DeadlineExceeded):
        await Call(mesh, timeout=0.1).placement()

    await mesh.until(num_waiting=0, num_placements=1)
    await first.close()


async def test_wait_is_bounded_without_a_deadline_too(serve: Serve) -> None:
    mesh = await serve(max_num_seqs=1, max_wait_s=0.05)
    first = Call(mesh)
    await first.placement()

    with pytest.raises(DeadlineExceeded, match="no placement within"):
        await Call(mesh).placement()

    await first.close()


async def test_draining_refuses_newcomers_and_waits_for_the_others(serve: Serve) -> None:
    mesh = await serve(max_num_seqs=1)
    first, second = Call(mesh), Call(mesh)
    await first.placement()
    waiting = asyncio.create_task(second.placement())
    await mesh.until(num_waiting=1, num_placements=1)

    draining = asyncio.create_task(mesh.scheduler.drain())

    with pytest.raises(WorkerUnavailable, match="draining"):
        await waiting
    with pytest.raises(WorkerUnavailable, match="draining"):
        await Call(mesh).placement()
    assert not draining.done()
    await first.close()
    await asyncio.wait_for(draining, 5)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ValueError("secret")])
async def test_stray_error_in_the_handler_reaches_the_caller_as_internal(
    serve: Serve, error: BaseException
) -> None:
    # GR-04
    mesh = await serve()
    mesh.lookup.error = error

    async with asyncio.timeout(1):
        with pytest.raises(InternalError) as caught:
            await Call(mesh).placement()

    assert "secret" not in str(caught.value)
    await mesh.until()


async def test_prompt_of_half_a_million_tokens_passes(serve: Serve) -> None:
    # GR-01
    mesh = await serve(
        registered("d0", max_model_len=1_000_000, num_blocks=100_000), reserved_output_tokens=0
    )
    request = PlaceRequest(
        admit=PlaceRequest.Admit(
            model="smol", prompt_token_ids=[4_000_000_000] * 800_000, max_tokens=1
        )
    )
    assert request.ByteSize() > 4 * 1024 * 1024 - 250_000
    call = Call(mesh, request)

    assert (await call.placement()).decode.worker_id == "d0"

    await call.close()


async def test_twenty_cancelled_calls_do_not_keep_others_waiting(serve: Serve) -> None:
    # GR-03
    mesh = await serve(registered("d0", num_blocks=1000))
    calls = [Call(mesh) for _ in range(20)]
    await asyncio.gather(*(call.placement() for call in calls))

    for call in calls:
        call.cancel()
    others = [Call(mesh) for _ in range(4)]
    async with asyncio.timeout(2):
        await asyncio.gather(*(other.placement() for other in others))

    await mesh.until(num_placements=4)
    for other in others:
        await other.close()


async def test_state_shows_workers_with_their_load(serve: Serve) -> None:
    mesh = await serve()

    state = await mesh.state()

    assert [(one.worker_id, one.role, one.incarnation) for one in state.workers] == [
        ("p0", "prefill", "1"),
        ("d0", "decode", "1"),
    ]
    assert state.workers[0].load.num_free_blocks == 100


async def test_span_ends_before_the_placement_is_sent_and_is_the_callers_child(
    serve: Serve,
) -> None:
    # OB-01, OB-04
    exporter = InMemorySpanExporter()
    telemetry.start_tracing("test", SimpleSpanProcessor(exporter))
    try:
        mesh = await serve()
        with telemetry.span("gateway.request") as parent:
            call = Call(mesh)
            await call.placement()
        ended = {span.name: span for span in exporter.get_finished_spans()}
        call.cancel()
        await mesh.until()
    finally:
        telemetry.shutdown()

    place = ended["scheduler.place"]
    assert place.parent is not None
    assert place.parent.span_id == parent.get_span_context().span_id
    assert place.attributes is not None
    assert place.attributes["pdmesh.placement.mode"] == "disaggregated"
    assert place.attributes["pdmesh.placement.reason"] == "prefill_remote"
    assert place.attributes["pdmesh.placement.prefill.num_cached_tokens"] == 0


async def test_decisions_are_counted_by_reason(serve: Serve) -> None:
    mesh = await serve()
    before = _num_local_decisions()

    call = Call(mesh, admit(5))
    await call.placement()
    await call.close()

    assert _num_local_decisions() == before + 1


def _num_local_decisions() -> float:
    # Other tests of the process may have counted with other labels.
    labels = {'decision="local"', 'reason="isl_bounding"'}
    return sum(
        float(line.rpartition(" ")[2])
        for line in metrics.render()[0].decode().splitlines()
        if line.startswith("pdmesh_disagg_decision_total") and all(one in line for one in labels)
    )


async def test_random_calls_and_cancellations_leave_no_placement(serve: Serve) -> None:
    # KV-16
    workers = [registered(f"p{n}", "prefill") for n in range(2)]
    workers += [registered(f"d{n}") for n in range(2)]
    mesh = await serve(*workers, max_num_seqs=3, max_num_waiting=20)
    chance = random.Random(7)

    async def one_request() -> None:
        call = Call(mesh, admit(chance.choice([5, 100, 400]), chance.choice([1, 200])))
        placing = asyncio.create_task(call.placement())
        if chance.random() < 0.3:
            await asyncio.wait([placing], timeout=chance.random() * 0.02)
            # Both, since a write that has not begun does not notice its call's end.
            call.cancel()
            placing.cancel()
            await asyncio.wait([placing])
            return
        try:
            await placing
        except QueueFull:
            return
        if chance.random() < 0.6:
            await call.prefill_done()
        await asyncio.sleep(chance.random() * 0.01)
        if chance.random() < 0.5:
            call.cancel()
        else:
            await call.close()

    async with asyncio.timeout(60):
        for _ in range(6):
            await asyncio.gather(*(one_request() for _ in range(50)))

    await mesh.until()
    assert set((await mesh.num_placements()).values()) == {0}


async def test_objective_that_cannot_be_met_is_refused_at_once_with_a_delay(serve: Serve) -> None:
    mesh = await serve()
    await _measure(mesh, num_requests=20, prefill_ms=2000)
    before = _num_rejections("ttft_objective")

    with pytest.raises(QueueFull) as caught:
        await Call(mesh, admit(ttft_objective_ms=500)).placement()

    assert caught.value.retry_after_s is not None
    assert 1 <= caught.value.retry_after_s <= 3
    assert _num_rejections("ttft_objective") == before + 1
    patient = Call(mesh, admit(ttft_objective_ms=60_000))
    await patient.placement()
    await patient.close()


async def _measure(mesh: Mesh, num_requests: int, prefill_ms: float) -> None:
    """Requests that tell how long they took, as the gateway does."""
    for number in range(num_requests):
        call = Call(mesh, admit(160 + number))
        await call.placement()
        await call.tell(
            PlaceRequest(
                prefill_done=PlaceRequest.PrefillDone(
                    timings=[_timing(types_pb2.STAGE_PREFILL_COMPUTE, prefill_ms)]
                )
            )
        )
        await call.tell(
            PlaceRequest(
                finished=PlaceRequest.Finished(
                    timings=[
                        _timing(types_pb2.STAGE_PREFILL_COMPUTE, prefill_ms),
                        _timing(types_pb2.STAGE_KV_TRANSFER, 50),
                        _timing(types_pb2.STAGE_DECODE_STEPS, 150),
                    ],
                    num_output_tokens=16,
                )
            )
        )
        await call.close()


def _timing(stage: types_pb2.Stage.ValueType, duration_ms: float) -> types_pb2.StageTiming:
    return types_pb2.StageTiming(stage=stage, duration_ms=duration_ms)


def _num_rejections(reason: str) -> float:
    for line in metrics.render()[0].decode().splitlines():
        if line.startswith("pdmesh_scheduler_rejections_total") and f'"{reason}"' in line:
            return float(line.rpartition(" ")[2])
    return 0


async def test_state_says_when_this_deployment_is_better_off_local(serve: Serve) -> None:
    mesh = await serve(local_margin=0)
    await _measure(mesh, num_requests=20, prefill_ms=100)
    [verdict] = (await mesh.state()).verdicts
    assert verdict.advice == scheduler_pb2.DisaggregationVerdict.ADVICE_UNSPECIFIED
    assert verdict.prefill_tokens_per_second > 0
    assert verdict.transfer_tokens_per_second > 0

    reasons = set()
    for _ in range(40):
        call = Call(mesh, admit())
        reasons.add((await call.placement()).reason)
        await call.close()

    # An idle decode worker computes as fast, and nothing has to move.
    assert "local_cheaper" in reasons
    [verdict] = (await mesh.state()).verdicts
    assert verdict.model == "smol"
    assert verdict.advice == scheduler_pb2.DisaggregationVerdict.ADVICE_LOCAL
    assert 0 < verdict.local_ms < verdict.remote_ms


async def test_tenants_and_classes_decide_who_goes_first(serve: Serve) -> None:
    mesh = await serve(registered("d0"), max_num_seqs=1, quantum=500)
    holder = Call(mesh)
    await holder.placement()
    calls = {
        "flood-1": Call(mesh, admit(tenant="flood", max_tokens=400)),
        "flood-2": Call(mesh, admit(tenant="flood", max_tokens=400)),
        "job": Call(mesh, admit(priority_class=types_pb2.PRIORITY_CLASS_OFFLINE)),
        "few": Call(mesh, admit(tenant="few")),
    }
    order: list[str] = []

    async def serve_one(name: str, call: Call) -> None:
        await call.placement()
        order.append(name)
        await call.close()

    tasks = []
    for number, (name, call) in enumerate(calls.items(), 1):
        tasks.append(asyncio.create_task(serve_one(name, call)))
        await mesh.until(num_waiting=number, num_placements=1)
    await holder.close()
    await asyncio.gather(*tasks)

    assert order.index("few") < order.index("flood-2")
    assert order[-1] == "job"


async def test_very_long_prompts_may_not_have_all_workers(serve: Serve) -> None:
    workers = [registered(f"p{n}", "prefill") for n in range(2)]
    mesh = await serve(*workers, registered("d0"), objectives=Objectives(long_prompt_tokens=500))
    long, other = Call(mesh, admit(600)), Call(mesh, admit(600))
    await long.placement()
    waiting = asyncio.create_task(other.placement())
    await mesh.until(num_waiting=1, num_placements=1)

    short = Call(mesh, admit(100))
    await short.placement()
    await short.close()
    assert not waiting.done()
    await long.prefill_done()

    await asyncio.wait_for(waiting, 5)
    await long.close()
    await other.close()


def failed(worker_id: str, failure: scheduler_pb2.WorkerFailure.ValueType) -> Any:
    return PlaceRequest(failed=PlaceRequest.Failed(worker_id=worker_id, failure=failure))


async def breaker_states(mesh: Mesh) -> dict[str, str]:
    workers = (await mesh.state()).workers
    return {one.worker_id: scheduler_pb2.BreakerState.Name(one.breaker)[14:] for one in workers}


async def test_worker_that_was_lost_gets_nothing_until_a_probe_finds_it_well(serve: Serve) -> None:
    mesh = await serve(registered("d0"), registered("d1"), breaker_first_open_s=0.2)
    first = Call(mesh)
    lost = (await first.placement()).decode.worker_id
    other = {"d0": "d1", "d1": "d0"}[lost]

    await first.tell(failed(lost, scheduler_pb2.WORKER_FAILURE_LOST))
    await first.close()

    assert await breaker_states(mesh) == {lost: "OPEN", other: "CLOSED"}
    calls = [Call(mesh) for _ in range(4)]
    assert {(await call.placement()).decode.worker_id for call in calls} == {other}
    async with asyncio.timeout(5):
        # Nothing tells when a breaker's time is over.
        while (await breaker_states(mesh))[lost] != "HALF_OPEN":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    # The idle one is the cheaper one, but one request is enough to find out.
    probe, next_one = Call(mesh), Call(mesh)
    assert (await probe.placement()).decode.worker_id == lost
    assert (await next_one.placement()).decode.worker_id == other
    await probe.tell(PlaceRequest(finished=PlaceRequest.Finished(num_output_tokens=1)))
    await probe.close()
    assert await breaker_states(mesh) == {lost: "CLOSED", other: "CLOSED"}


async def test_requests_wait_for_the_breaker_of_the_only_worker(serve: Serve) -> None:
    mesh = await serve(registered("d0"), breaker_first_open_s=0.2)
    first = Call(mesh)
    await first.placement()
    await first.tell(failed("d0", scheduler_pb2.WORKER_FAILURE_LOST))
    await first.close()

    waiting = Call(mesh)
    placing = asyncio.ensure_future(waiting.placement())
    await mesh.until(num_waiting=1)
    # No heartbeat, no other request: only time goes by.
    placement = await asyncio.wait_for(placing, 5)

    assert placement.decode.worker_id == "d0"
    with pytest.raises(ContextLengthExceeded):
        await Call(mesh, admit(5000)).placement()


async def test_prompts_are_computed_locally_while_every_prefill_worker_is_out(serve: Serve) -> None:
    mesh = await serve(breaker_first_open_s=60)
    first = Call(mesh)
    assert (await first.placement()).prefill.worker_id == "p0"
    await first.tell(failed("p0", scheduler_pb2.WORKER_FAILURE_LOST))
    await first.close()

    placement = await Call(mesh).placement()

    assert placement.mode == scheduler_pb2.PLACEMENT_MODE_LOCAL
    assert placement.reason == "no_prefill_worker"
