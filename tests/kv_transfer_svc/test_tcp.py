"""Pulls between two agents over TCP: what arrives, and what is refused."""

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kv_transfer_svc.pulls import Pull
from kv_transfer_svc.segments import SegmentSpec
from kv_transfer_svc.transports import block_wire
from mesh import telemetry
from mesh.errors import InvalidRequest, KvTransferFailed, LayoutMismatch
from tests.transfer_agents import pull_from, read_blocks, read_one

MakeSegment = Callable[..., SegmentSpec]
StartAgent = Callable[..., Any]

# Large enough for several streams and for more than a socket's buffers hold.
BIG = {"num_blocks": 64, "block_bytes": 1 << 19}
ALL = list(range(64))


async def test_blocks_of_another_machine_arrive_and_no_others_change(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    here, there = await start(), await start()
    source, destination = make_segment("p"), make_segment("d")
    there.attach(source)
    here.attach(destination)
    before = read_blocks(destination)

    moved = await here.agent.pull(pull_from(there, [3, 4, 9], [0, 1, 5]))

    after = read_blocks(destination)
    assert np.array_equal(after[[0, 1, 5]], read_blocks(source)[[3, 4, 9]])
    others = [2, 3, 4, *range(6, 16)]
    assert np.array_equal(after[others], before[others])
    assert (moved.num_bytes, moved.num_runs, moved.transport) == (15000, 2, "tcp")


async def test_scattered_blocks_arrive_over_several_streams(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    here, there = await start(num_streams=3), await start()
    source, destination = make_segment("p", **BIG), make_segment("d", **BIG)
    there.attach(source)
    here.attach(destination)
    shuffled = np.random.default_rng(1).permutation(64).tolist()

    for _ in range(2):  # the second time over the same connections
        await here.agent.pull(pull_from(there, shuffled, ALL))

        assert np.array_equal(read_blocks(destination), read_blocks(source)[shuffled])


async def test_what_the_other_machine_sends_is_part_of_the_readers_trace(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    # OB-04
    here, there = await start(num_streams=3), await start()
    there.attach(make_segment("p", **BIG))
    here.attach(make_segment("d", **BIG))
    exporter = InMemorySpanExporter()
    telemetry.start_tracing("kv_transfer", SimpleSpanProcessor(exporter))
    try:
        with telemetry.span("kv.pull"):
            await here.agent.pull(pull_from(there, ALL, ALL))
        pull, *sends = reversed(exporter.get_finished_spans())
        await here.agent.pull(pull_from(there, ALL, ALL))
        assert len(exporter.get_finished_spans()) == len(sends) + 1
    finally:
        telemetry.shutdown()

    assert len(sends) == 3
    for send in sends:
        assert send.name == "kv.send"
        assert send.parent is not None
        assert pull.context is not None
        assert (send.parent.trace_id, send.parent.span_id) == (
            pull.context.trace_id,
            pull.context.span_id,
        )
        assert (send.end_time or 0) <= (pull.end_time or 0)
    sent = [dict(send.attributes or {})["pdmesh.kv.bytes"] for send in sends]
    assert sum(int(str(one)) for one in sent) == 64 << 19


async def test_engine_of_this_machine_is_read_from_memory_whatever_the_caller_says(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    here, there = await start(), await start()
    for name in ("p", "d"):
        here.attach(make_segment(name))

    moved = await here.agent.pull(pull_from(there, [1], [2]))

    assert moved.transport == "shared_memory"


async def test_engine_that_its_machine_does_not_know_is_named(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    # KV-23
    here, there = await start(), await start()
    here.attach(make_segment("d"))

    with pytest.raises(KvTransferFailed, match="'p' is not attached"):
        await here.agent.pull(pull_from(there, [1], [1]))


async def test_agent_that_calls_itself_for_an_engine_that_left_says_so(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    here = await start()
    here.attach(make_segment("d"))

    with pytest.raises(KvTransferFailed, match="'p' is not attached"):
        await here.agent.pull(pull_from(here, [1], [1]))


async def test_different_layouts_are_refused_before_a_byte_moves(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    # KV-25
    here, there = await start(), await start()
    there.attach(make_segment("p", fingerprint="aaa"))
    destination = make_segment("d", fingerprint="bbb")
    here.attach(destination)
    before = read_blocks(destination)

    with pytest.raises(LayoutMismatch, match=r"aaa and bbb|bbb and aaa"):
        await here.agent.pull(pull_from(there, [1], [1]))

    assert np.array_equal(read_blocks(destination), before)


async def test_restarted_agent_is_asked_again(start: StartAgent, make_segment: MakeSegment) -> None:
    # KV-23
    here, there = await start(), await start()
    source = make_segment("p")
    there.attach(source)
    destination = make_segment("d")
    here.attach(destination)
    await here.agent.pull(pull_from(there, [1], [1]))

    await there.stop()
    with pytest.raises(KvTransferFailed):
        await here.agent.pull(pull_from(there, [2], [2]))
    again = await start(listen=there.address)
    again.attach(source)
    await here.agent.pull(pull_from(again, [3], [3]))

    assert np.array_equal(read_blocks(destination)[3], read_blocks(source)[3])


async def test_token_of_a_former_agent_is_refused(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    # KV-23
    here, there = await start(), await start()
    there.attach(make_segment("p"))
    destination = here.attach(make_segment("d"))
    assert here.agent.network is not None
    located = await here.agent.network.peers.locate(there.address, "p")
    stale = replace(located, token=bytes(block_wire.TOKEN_BYTES))

    with pytest.raises(KvTransferFailed, match="token is another agent's"):
        await read_one(here, stale, destination)


def with_generations(spec: SegmentSpec, generations: list[int]) -> SegmentSpec:
    with Path(spec.path).open("ab") as file:
        file.write(np.array(generations, "<u4").tobytes())
    return replace(spec, generations_offset=spec.num_bytes)


def set_generation(spec: SegmentSpec, block_id: int, generation: int) -> None:
    assert spec.generations_offset is not None
    with Path(spec.path).open("r+b") as file:
        file.seek(spec.generations_offset + 4 * block_id)
        file.write(np.array([generation], "<u4").tobytes())


@pytest.mark.parametrize("is_remote", [True, False])
async def test_block_with_another_generation_is_refused(
    start: StartAgent, make_segment: MakeSegment, is_remote: bool
) -> None:
    here = await start()
    there = await start() if is_remote else here
    source = with_generations(make_segment("p"), list(range(100, 116)))
    there.attach(source)
    destination = make_segment("d")
    here.attach(destination)
    before = read_blocks(destination)

    def pull(*generations: int) -> Pull:
        return replace(pull_from(there, [3, 4], [0, 1]), source_generations=generations)

    with pytest.raises(KvTransferFailed, match="has reused 1 of the blocks"):
        await here.agent.pull(pull(103, 105))
    assert np.array_equal(read_blocks(destination), before)
    with pytest.raises(InvalidRequest, match="1 generations for 2 blocks"):
        await here.agent.pull(pull(103))
    await here.agent.pull(pull(103, 104))
    assert np.array_equal(read_blocks(destination)[:2], read_blocks(source)[3:5])


async def test_block_reused_while_it_is_sent_fails_the_read(
    start: StartAgent, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = await start(), await start()
    source = with_generations(make_segment("p"), [7] * 16)
    there.attach(source)
    here.attach(make_segment("d"))
    send_piece = block_wire.send_piece

    def piece_then_reuse(connection: socket.socket, payload: memoryview) -> None:
        send_piece(connection, payload)
        set_generation(source, 3, 8)

    monkeypatch.setattr(block_wire, "send_piece", piece_then_reuse)

    with pytest.raises(KvTransferFailed, match="has reused 1 of the blocks"):
        await here.agent.pull(replace(pull_from(there, [3, 4], [0, 1]), source_generations=[7, 7]))
