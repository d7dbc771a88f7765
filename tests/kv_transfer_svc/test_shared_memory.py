"""The copy between two mappings: exact, whole, and off the interpreter's lock."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer_svc.runs import BlockRun, to_runs
from kv_transfer_svc.segments import Segment, SegmentSpec, SegmentTable
from kv_transfer_svc.transports import segment_copy
from kv_transfer_svc.transports.segment_copy import copy_runs
from kv_transfer_svc.transports.shared_memory import SharedMemoryTransport

MakeSegment = Callable[..., SegmentSpec]


@pytest.fixture
def pair(make_segment: MakeSegment) -> Iterator[tuple[Segment, Segment]]:
    table = SegmentTable()
    with ExitStack() as stack:
        yield (
            stack.enter_context(table.attached(make_segment("source", 32))),
            stack.enter_context(table.attached(make_segment("destination", 24))),
        )


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=50,
)
@given(data=st.data())
def test_named_blocks_arrive_and_no_others_change(
    pair: tuple[Segment, Segment], data: st.DataObject
) -> None:
    source, destination = pair
    destinations = data.draw(st.lists(st.integers(0, 23), unique=True))
    sources = [data.draw(st.integers(0, 31)) for _ in destinations]
    expected = destination.blocks.copy()
    for source_id, destination_id in zip(sources, destinations, strict=True):
        expected[destination_id] = source.blocks[source_id]

    num_bytes = copy_runs(source, destination, to_runs(sources, destinations, 32, 24))

    assert num_bytes == len(destinations) * 5000
    assert np.array_equal(destination.blocks, expected)


class Gate:
    """Stands in for the copy: it tells when it has begun and ends when it may."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.num_begun = 0
        self.num_ended = 0
        self.error: Exception | None = None

    def copy(self, source: Segment, destination: Segment, runs: list[BlockRun]) -> int:
        self.num_begun += 1
        self.has_begun.set()
        assert self.may_end.wait(10)
        self.num_ended += 1
        if self.error is not None:
            raise self.error
        return 7


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(segment_copy, "copy_runs", gate.copy)
    return gate


@pytest.mark.parametrize("error", [None, ValueError("lost")])
async def test_cancelled_copy_ends_only_when_the_last_byte_is_written(
    pair: tuple[Segment, Segment], gate: Gate, error: Exception | None
) -> None:
    # KV-21
    gate.error = error
    with closing(SharedMemoryTransport(1)) as transport:
        copying = asyncio.create_task(transport.copy(*pair, []))
        await asyncio.to_thread(gate.has_begun.wait)

        for _ in range(3):
            copying.cancel()
            await asyncio.wait([copying], timeout=0.01)
        assert not copying.done()
        gate.may_end.set()
        await asyncio.wait([copying])

    assert copying.cancelled()
    assert gate.num_ended == 1


async def test_cancelled_copy_that_waits_for_a_thread_never_begins(
    pair: tuple[Segment, Segment], gate: Gate
) -> None:
    with closing(SharedMemoryTransport(1)) as transport:
        running = asyncio.create_task(transport.copy(*pair, []))
        await asyncio.to_thread(gate.has_begun.wait)
        queued = asyncio.create_task(transport.copy(*pair, []))
        await asyncio.sleep(0)

        queued.cancel()
        await asyncio.wait([queued], timeout=5)
        assert queued.cancelled()
        gate.may_end.set()
        assert await running == 7

    assert gate.num_begun == 1


async def test_error_of_the_copy_reaches_the_caller(
    pair: tuple[Segment, Segment], gate: Gate
) -> None:
    gate.error = ValueError("lost")
    gate.may_end.set()

    with closing(SharedMemoryTransport(1)) as transport, pytest.raises(ValueError, match="lost"):
        await transport.copy(*pair, [])


BLOCK_BYTES = 368_640


@pytest.fixture
def large_pair(make_segment: MakeSegment) -> Iterator[tuple[Segment, Segment]]:
    table = SegmentTable()
    with ExitStack() as stack:
        yield (
            stack.enter_context(table.attached(make_segment("source", 300, BLOCK_BYTES))),
            stack.enter_context(table.attached(make_segment("destination", 300, BLOCK_BYTES))),
        )


def test_other_threads_run_while_blocks_are_copied(large_pair: tuple[Segment, Segment]) -> None:
    runs = [BlockRun(0, 0, 250)]
    copy_runs(*large_pair, runs)
    copies: list[tuple[float, float]] = []
    turns: list[float] = []
    ended = threading.Event()

    def copy_often() -> None:
        for _ in range(10):
            started = time.perf_counter()
            copy_runs(*large_pair, runs)
            copies.append((started, time.perf_counter()))
        ended.set()

    with ThreadPoolExecutor(1) as threads:
        copying = threads.submit(copy_often)
        while not ended.is_set():
            turns.append(time.perf_counter())
        copying.result()

    # Were the lock held, it would change hands at the end of a copy, never in its first half.
    num_shared = sum(
        any(start < turn < start + 0.4 * (end - start) for turn in turns) for start, end in copies
    )
    assert num_shared > len(copies) / 4
