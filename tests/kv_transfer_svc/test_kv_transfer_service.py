"""KvTransferService over the wire: segments live as long as their calls, pulls to their end."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kv_transfer_svc.agent import TransferAgent
from kv_transfer_svc.app import SERVICE_NAME
from kv_transfer_svc.segments import SegmentSpec, SegmentTable
from kv_transfer_svc.service import KvTransferServicer
from kv_transfer_svc.transports import segment_copy
from kv_transfer_svc.transports.shared_memory import SharedMemoryTransport
from mesh import metrics, telemetry
from mesh.client import connect, mesh_errors
from mesh.errors import (
    InternalError,
    InvalidRequest,
    KvTransferFailed,
    LayoutMismatch,
    WorkerUnavailable,
)
from mesh.server import MeshServer
from mesh.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc, types_pb2
from tests.transfer_agents import read_blocks

MakeSegment = Callable[..., SegmentSpec]


@dataclass
class Served:
    """An agent and a client of it."""

    agent: TransferAgent
    stub: Any

    async def attach(self, spec: SegmentSpec) -> Any:
        """An open AttachSegment call whose segment is mapped."""
        call = self.stub.AttachSegment(
            kv_transfer_pb2.AttachSegmentRequest(
                engine_id=spec.engine_id,
                path=spec.path,
                block_bytes=spec.block_bytes,
                num_blocks=spec.num_blocks,
                layout_fingerprint=spec.layout_fingerprint,
            )
        )
        with mesh_errors():
            await anext(aiter(call))
        return call

    async def pull(
        self, source_ids: list[int], destination_ids: list[int], **options: Any
    ) -> kv_transfer_pb2.PullResponse:
        with mesh_errors():
            response: kv_transfer_pb2.PullResponse = await self.stub.Pull(
                kv_transfer_pb2.PullRequest(
                    request_id="r1",
                    source_engine_id="p",
                    source_block_ids=source_ids,
                    destination_engine_id="d",
                    destination_block_ids=destination_ids,
                ),
                **options,
            )
        return response

    async def stats(self) -> kv_transfer_pb2.GetStatsResponse:
        stats: kv_transfer_pb2.GetStatsResponse = await self.stub.GetStats(
            kv_transfer_pb2.GetStatsRequest()
        )
        return stats

    async def until(self, **counts: int) -> None:
        """Until the agent reports these counts."""
        async with asyncio.timeout(20):
            while True:
                stats = await self.stats()
                if all(getattr(stats, name) == count for name, count in counts.items()):
                    return


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        transport = stack.enter_context(closing(SharedMemoryTransport(2)))
        agent = TransferAgent(SegmentTable(), transport)
        server = MeshServer("127.0.0.1:0")
        server.add(
            kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server,
            KvTransferServicer(agent),
            SERVICE_NAME,
        )
        address = await server.start()
        stack.push_async_callback(server.stop, 0)
        channel = connect(address)
        stack.push_async_callback(channel.close)
        yield Served(agent, kv_transfer_pb2_grpc.KvTransferServiceStub(channel))


def is_mapped(spec: SegmentSpec) -> bool:
    return spec.path in Path("/proc/self/maps").read_text()


async def test_pulled_blocks_are_in_the_destinations_memory(
    served: Served, make_segment: MakeSegment
) -> None:
    source, destination = make_segment("p"), make_segment("d")
    before = read_blocks(destination)
    await served.attach(source)
    await served.attach(destination)

    response = await served.pull([3, 4, 9], [0, 1, 5])

    after = read_blocks(destination)
    assert np.array_equal(after[[0, 1, 5]], read_blocks(source)[[3, 4, 9]])
    others = [2, 3, 4, *range(6, 16)]
    assert np.array_equal(after[others], before[others])
    assert response.payload_bytes == 3 * 5000
    assert [timing.stage for timing in response.timings] == [types_pb2.STAGE_KV_TRANSFER]
    assert response.timings[0].duration_ms > 0


async def test_stats_count_what_was_moved(served: Served, make_segment: MakeSegment) -> None:
    await served.attach(make_segment("p"))
    await served.attach(make_segment("d"))

    await served.pull([1, 2], [3, 4])
    await served.pull([1], [5])

    stats = await served.stats()
    assert (stats.num_segments, stats.num_pulls, stats.payload_bytes) == (2, 2, 15000)
    assert stats.num_active_pulls == 0
    assert stats.copy_seconds > 0


async def test_segment_is_known_while_its_call_is_open(
    served: Served, make_segment: MakeSegment
) -> None:
    call = await served.attach(make_segment("p"))
    await served.attach(make_segment("d"))

    call.cancel()
    await served.until(num_segments=1)

    with pytest.raises(KvTransferFailed, match="'p' is not attached"):
        await served.pull([1], [1])


async def test_engine_attaches_again_before_its_old_call_is_noticed_to_be_dead(
    served: Served, make_segment: MakeSegment
) -> None:
    # KV-23
    spec = make_segment("p")
    old = await served.attach(spec)
    await served.attach(spec)
    await served.attach(make_segment("d"))

    old.cancel()
    await asyncio.wait([asyncio.ensure_future(old.code())])

    assert (await served.pull([1], [1])).payload_bytes == 5000
    await served.until(num_segments=2)


async def test_segment_smaller_than_announced_is_refused(
    served: Served, make_segment: MakeSegment
) -> None:
    # KV-20
    spec = make_segment("p", num_blocks=16)

    with pytest.raises(InvalidRequest, match="fewer than 17 blocks"):
        await served.attach(replace(spec, num_blocks=17))
    with pytest.raises(InvalidRequest, match="nowhere"):
        await served.attach(replace(spec, path="/dev/shm/nowhere"))

    await served.until(num_segments=0)


async def test_counts_that_differ_are_refused(served: Served, make_segment: MakeSegment) -> None:
    # KV-20
    await served.attach(make_segment("p"))
    await served.attach(make_segment("d"))

    with pytest.raises(InvalidRequest, match="2 source blocks cannot fill 1"):
        await served.pull([1, 2], [1])


async def test_layout_mismatch_is_a_failed_precondition_that_names_both(
    served: Served, make_segment: MakeSegment
) -> None:
    await served.attach(make_segment("p", fingerprint="aaa"))
    await served.attach(make_segment("d", fingerprint="bbb"))

    with pytest.raises(LayoutMismatch, match=r"aaa and bbb|bbb and aaa") as caught:
        await served.pull([1], [1])

    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_cancelled_pull_is_active_until_its_copy_has_ended(
    served: Served, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # KV-21
    has_begun, may_end = threading.Event(), threading.Event()
    copy_runs = segment_copy.copy_runs

    def slow_copy(*arguments: Any) -> int:
        has_begun.set()
        assert may_end.wait(10)
        return copy_runs(*arguments)

    monkeypatch.setattr(segment_copy, "copy_runs", slow_copy)
    source, destination = make_segment("p"), make_segment("d")
    await served.attach(source)
    attached = await served.attach(destination)
    pulling = asyncio.create_task(served.pull([1], [1]))
    await asyncio.to_thread(has_begun.wait)

    pulling.cancel()
    attached.cancel()
    await served.until(num_segments=1, num_active_pulls=1)
    may_end.set()
    await served.until(num_active_pulls=0)

    assert np.array_equal(read_blocks(destination)[1], read_blocks(source)[1])
    # The thread that copied lets go of its view a moment after its last word.
    async with asyncio.timeout(20):
        while is_mapped(destination):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_twenty_cancelled_pulls_do_not_keep_others_waiting(
    served: Served, make_segment: MakeSegment
) -> None:
    # GR-03
    await served.attach(make_segment("p"))
    await served.attach(make_segment("d"))
    pulls = [asyncio.create_task(served.pull([1], [1])) for _ in range(20)]
    await asyncio.sleep(0)

    for pull in pulls:
        pull.cancel()
    async with asyncio.timeout(20):
        await asyncio.gather(*(served.pull([n], [n]) for n in range(4)))

    await asyncio.wait(pulls)
    await served.until(num_active_pulls=0)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ValueError("secret")])
async def test_stray_error_reaches_the_caller_as_internal(
    served: Served,
    make_segment: MakeSegment,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    # GR-04
    def broken_copy(*arguments: Any) -> int:
        raise error

    monkeypatch.setattr(segment_copy, "copy_runs", broken_copy)
    await served.attach(make_segment("p"))
    await served.attach(make_segment("d"))

    async with asyncio.timeout(20):
        with pytest.raises(InternalError) as caught:
            await served.pull([1], [1])

    assert "secret" not in str(caught.value)
    await served.until(num_active_pulls=0)


async def test_pull_of_many_blocks_passes_the_wire(
    served: Served, make_segment: MakeSegment
) -> None:
    # GR-01: ids above 4 MiB.
    await served.attach(make_segment("p", num_blocks=750_000, block_bytes=2))
    await served.attach(make_segment("d", num_blocks=750_000, block_bytes=2))

    response = await served.pull([*range(750_000)], [*range(750_000)])

    assert response.payload_bytes == 1_500_000


async def test_draining_agent_lets_go_of_its_segments(
    served: Served, make_segment: MakeSegment
) -> None:
    spec = make_segment("p")
    call = await served.attach(spec)

    await served.agent.drain()

    assert await call.code() is grpc.StatusCode.UNAVAILABLE
    await served.until(num_segments=0)
    attached_late = await served.attach(spec)
    with pytest.raises(WorkerUnavailable), mesh_errors():
        await anext(aiter(attached_late))


async def test_pull_that_a_drain_cuts_short_is_answered(
    served: Served, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def slow_copy(*arguments: Any) -> int:
        has_begun.set()
        may_end.wait(60)
        return 0

    monkeypatch.setattr(segment_copy, "copy_runs", slow_copy)
    await served.attach(make_segment("p"))
    await served.attach(make_segment("d"))
    pulling = asyncio.create_task(served.pull([1], [2]))
    await asyncio.to_thread(has_begun.wait)
    draining = asyncio.create_task(served.agent.drain())
    await asyncio.sleep(0)

    draining.cancel()
    may_end.set()

    with pytest.raises(WorkerUnavailable):
        await asyncio.wait_for(pulling, 20)


async def test_span_tells_size_and_pace_and_is_the_callers_child(
    served: Served, make_segment: MakeSegment
) -> None:
    # OB-04
    await served.attach(make_segment("p"))
    await served.attach(make_segment("d"))
    exporter = InMemorySpanExporter()
    telemetry.start_tracing("test", SimpleSpanProcessor(exporter))
    try:
        with telemetry.span("decode.run") as parent:
            await served.pull([1, 2, 5], [1, 2, 3])
        spans = {span.name: span for span in exporter.get_finished_spans()}
    finally:
        telemetry.shutdown()

    pull = spans["kv.pull"]
    assert pull.parent is not None
    assert pull.parent.span_id == parent.get_span_context().span_id
    assert pull.attributes is not None
    assert pull.attributes["pdmesh.kv.bytes"] == 15000
    assert pull.attributes["pdmesh.kv.num_blocks"] == 3
    assert pull.attributes["pdmesh.kv.num_runs"] == 2
    gb_per_s = pull.attributes["pdmesh.kv.gb_per_s"]
    assert isinstance(gb_per_s, float)
    assert gb_per_s > 0


async def test_bytes_and_seconds_are_metrics(served: Served, make_segment: MakeSegment) -> None:
    await served.attach(make_segment("p"))
    await served.attach(make_segment("d"))
    before = _sample("pdmesh_kv_transfer_size_bytes_sum")

    await served.pull([1, 2], [1, 2])

    assert _sample("pdmesh_kv_transfer_size_bytes_sum") == before + 10000
    assert _sample("pdmesh_kv_transfer_duration_seconds_count") >= 1


def _sample(name: str) -> float:
    """Over all its labels."""
    lines = metrics.render()[0].decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith((f"{name}{{", f"{name} "))
    )


async def test_random_pulls_and_cancellations_leave_nothing_behind(
    served: Served, make_segment: MakeSegment
) -> None:
    source, destination = make_segment("p", 64), make_segment("d", 64)
    await served.attach(source)
    await served.attach(destination)
    chance = random.Random(3)

    async def one_pull() -> None:
        num_blocks = chance.randrange(1, 20)
        ids = chance.sample(range(64), num_blocks)
        pulling = asyncio.create_task(served.pull(ids, ids))
        if chance.random() < 0.5:
            await asyncio.wait([pulling], timeout=chance.random() * 0.01)
            pulling.cancel()
        await asyncio.wait([pulling])

    for _ in range(5):
        await asyncio.gather(*(one_pull() for _ in range(30)))
    await served.until(num_active_pulls=0)
    await served.pull([*range(64)], [*range(64)])

    assert np.array_equal(read_blocks(destination), read_blocks(source))
