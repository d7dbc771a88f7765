"""SchedulerService over the wire: requests that wait for room."""

import asyncio

import pytest

from mesh.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    WorkerUnavailable,
)
from mesh.v1 import types_pb2
from scheduler_svc.objectives import Objectives
from tests.paper_workers import registered
from tests.scheduler_svc.served import Call, Serve, admit


async def test_first_token_makes_room_for_the_next_prompt(serve: Serve) -> None:
    mesh = await serve(
        registered("p0", "prefill"), registered("d0"), registered("d1"), max_num_seqs=1
    )
    first, second = Call(mesh), Call(mesh)
    await first.placement()
    waiting = asyncio.create_task(second.placement())
    await mesh.until(num_waiting=1, num_placements=1)

    await first.prefill_done()

    assert (await asyncio.wait_for(waiting, 20)).prefill.worker_id == "p0"
    await first.close()
    await second.close()


async def test_queued_request_is_placed_when_another_one_ends(serve: Serve) -> None:
    mesh = await serve(max_num_seqs=1)
    first, second = Call(mesh), Call(mesh)
    await first.placement()
    waiting = asyncio.create_task(second.placement())
    await mesh.until(num_waiting=1, num_placements=1)

    await first.close()

    placement = await asyncio.wait_for(waiting, 20)
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

    assert (await asyncio.wait_for(waiting, 20)).decode.worker_id == "d1"
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


async def test_what_could_never_fit_waits_for_nobody_and_pushes_nobody_out(serve: Serve) -> None:
    # KV-12
    mesh = await serve(registered("d0", num_blocks=12), max_num_seqs=1, max_num_waiting=1)
    first, second = Call(mesh), Call(mesh)
    await first.placement()
    waiting = asyncio.create_task(second.placement())
    await mesh.until(num_waiting=1, num_placements=1)

    with pytest.raises(ContextLengthExceeded):
        await Call(mesh, admit(2000)).placement()
    with pytest.raises(InvalidRequest, match="holds 192 tokens"):
        await Call(mesh, admit(200)).placement()

    await mesh.until(num_waiting=1, num_placements=1)
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
    await asyncio.wait_for(draining, 20)


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

    await asyncio.wait_for(waiting, 20)
    await long.close()
    await other.close()


async def test_very_long_prompt_is_not_overtaken_by_what_needs_less_room(serve: Serve) -> None:
    # KV-18
    worker = registered("d0", max_model_len=2048)
    mesh = await serve(worker, objectives=Objectives(long_prompt_tokens=500))
    # Eleven blocks each of a hundred.
    held = [Call(mesh) for _ in range(4)]
    for call in held:
        await call.placement()
    long, younger = Call(mesh, admit(1200)), Call(mesh)
    waiting = asyncio.create_task(long.placement())
    await mesh.until(num_waiting=1, num_placements=4)

    late = asyncio.create_task(younger.placement())
    await mesh.until(num_waiting=2, num_placements=4)
    for call in held[:2]:
        await call.close()

    await asyncio.wait_for(waiting, 20)
    assert not late.done()
    for call in (*held[2:], long):
        await call.close()
    await asyncio.wait_for(late, 20)
    await younger.close()
