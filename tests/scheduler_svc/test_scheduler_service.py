"""SchedulerService over the wire: placements live exactly as long as their calls."""

import asyncio
import random
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mesh import metrics, telemetry
from mesh.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    WorkerUnavailable,
)
from mesh.v1 import scheduler_pb2, types_pb2
from scheduler_svc.workers import Hits, PrefixHit
from tests.paper_workers import registered
from tests.scheduler_svc.served import PREFILL_DONE, RENEW, Call, PlaceRequest, Serve, admit


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
    async with asyncio.timeout(20):
        while (await mesh.num_placements())["p0"]:
            pass

    assert (await mesh.num_placements())[decode] == 1
    await call.close()


async def test_cancelling_during_the_lookup_leaves_nothing(serve: Serve) -> None:
    mesh = await serve()
    mesh.lookup.answering.clear()
    call = Call(mesh)
    asking = asyncio.create_task(call.placement())
    await asyncio.wait_for(mesh.lookup.asked.wait(), 20)

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
    await mesh.until(num_placements=0)

    assert await mesh.num_placements() == {"d0": 0, "p0": 0}
    with pytest.raises(DeadlineExceeded, match="nothing was heard of the placement"):
        await call.end()


async def test_placement_that_is_renewed_outlives_its_lease(serve: Serve) -> None:
    mesh = await serve(lease_s=1.5)
    call = Call(mesh)
    await call.placement()

    clock = asyncio.get_running_loop().time
    until = clock() + 2
    while clock() < until:
        await call.tell(RENEW)
        assert (await mesh.state()).num_placements == 1
        await asyncio.sleep(0.01)

    await mesh.until(num_placements=0)


async def test_second_admit_ends_the_call_and_the_placement(serve: Serve) -> None:
    mesh = await serve()
    call = Call(mesh)
    await call.placement()

    with pytest.raises(InvalidRequest, match="once, before all else"):
        await call.placement()

    await mesh.until()


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ValueError("secret")])
async def test_stray_error_in_the_handler_reaches_the_caller_as_internal(
    serve: Serve, error: BaseException
) -> None:
    # GR-04
    mesh = await serve()
    mesh.lookup.error = error

    async with asyncio.timeout(20):
        with pytest.raises(InternalError) as caught:
            await Call(mesh).placement()

    assert "secret" not in str(caught.value)
    await mesh.until()


async def test_prompt_above_four_mebibytes_passes(serve: Serve) -> None:
    # GR-01
    mesh = await serve(
        registered("d0", max_model_len=1_000_000, num_blocks=100_000), reserved_output_tokens=0
    )
    request = PlaceRequest(
        admit=PlaceRequest.Admit(
            model="smol", prompt_token_ids=[4_000_000_000] * 900_000, max_tokens=1
        )
    )
    assert request.ByteSize() > 4 * 1024 * 1024
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
    async with asyncio.timeout(20):
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
