"""Pulls without a wire: what is checked, and when a pull counts as over."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest

from kv_transfer_svc.agent import TransferAgent
from kv_transfer_svc.pulls import Moved, Pull
from kv_transfer_svc.runs import BlockRun
from kv_transfer_svc.segments import Segment, SegmentSpec, SegmentTable
from kv_transfer_svc.transports.segment_copy import FollowingCopy
from mesh.errors import InvalidRequest, KvTransferFailed, LayoutMismatch, WorkerUnavailable

MakeSegment = Callable[..., SegmentSpec]
PULL = Pull("p", [1, 2, 3], "d", [4, 5, 6])


class PaperTransport:
    """Moves nothing; says it moved `num_bytes`, once it may."""

    def __init__(self, num_bytes: int = 15000) -> None:
        self.num_bytes = num_bytes
        self.copies: list[Sequence[BlockRun]] = []
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def copy(self, source: Segment, destination: Segment, runs: Sequence[BlockRun]) -> int:
        self.copies.append(runs)
        self.has_begun.set()
        await self.may_end.wait()
        assert source.is_mapped
        assert destination.is_mapped
        return self.num_bytes

    async def follow(self, copy: FollowingCopy) -> int:
        raise AssertionError("nobody asked for that")


def make_agent(transport: PaperTransport, *specs: SegmentSpec) -> tuple[TransferAgent, ExitStack]:
    agent, attachments = TransferAgent(SegmentTable(), transport), ExitStack()
    for spec in specs:
        attachments.enter_context(agent.segments.attached(spec))
    return agent, attachments


async def test_pull_moves_runs_and_is_counted(make_segment: MakeSegment) -> None:
    transport = PaperTransport()
    agent, attachments = make_agent(transport, make_segment("p"), make_segment("d"))

    with attachments:
        moved = await agent.pull(PULL)

    assert transport.copies == [[BlockRun(1, 4, 3)]]
    assert (moved.num_bytes, moved.num_runs) == (15000, 1)
    assert (agent.stats.num_pulls, agent.stats.num_bytes) == (1, 15000)
    assert agent.stats.copy_s == moved.copy_s > 0


async def test_bytes_that_did_not_arrive_fail_the_pull(make_segment: MakeSegment) -> None:
    # KV-20
    agent, attachments = make_agent(
        PaperTransport(num_bytes=10000), make_segment("p"), make_segment("d")
    )

    with attachments, pytest.raises(KvTransferFailed, match="10000 of 15000 bytes"):
        await agent.pull(PULL)

    assert agent.stats.num_pulls == 0


async def test_different_layouts_are_refused_and_both_are_named(make_segment: MakeSegment) -> None:
    # KV-25
    transport = PaperTransport()
    agent, attachments = make_agent(
        transport, make_segment("p", fingerprint="aaa"), make_segment("d", fingerprint="bbb")
    )

    with attachments, pytest.raises(LayoutMismatch, match=r"'d' here.*'p' there.*bbb and aaa"):
        await agent.pull(PULL)

    assert transport.copies == []


async def test_layouts_that_are_known_are_refused_with_what_they_differ_in(
    make_segment: MakeSegment,
) -> None:
    # KV-25
    source = replace(
        make_segment("p", fingerprint="aaa"), layout={"dtype": "bfloat16", "block_size": "16"}
    )
    destination = replace(
        make_segment("d", fingerprint="bbb"), layout={"dtype": "float32", "block_size": "16"}
    )
    agent, attachments = make_agent(PaperTransport(), source, destination)

    with attachments, pytest.raises(LayoutMismatch) as caught:
        await agent.pull(PULL)

    assert str(caught.value) == (
        "engine 'd' here cannot use blocks of engine 'p' there: "
        "dtype is float32 here and bfloat16 there"
    )


async def test_different_block_sizes_are_refused_whatever_the_fingerprints_say(
    make_segment: MakeSegment,
) -> None:
    # KV-20
    agent, attachments = make_agent(
        PaperTransport(), make_segment("p", block_bytes=5000), make_segment("d", block_bytes=4000)
    )

    with attachments, pytest.raises(LayoutMismatch, match=r"5000 bytes.*4000"):
        await agent.pull(PULL)


@pytest.mark.parametrize(
    "pull",
    [
        replace(PULL, source_block_ids=[1, 2]),
        replace(PULL, source_block_ids=[1, 2, 16]),
        replace(PULL, destination_block_ids=[1, 2, 16]),
        replace(PULL, destination_block_ids=[4, 4, 4]),
        replace(PULL, destination_engine_id="p"),
    ],
)
async def test_nonsense_is_refused_before_a_byte_moves(
    make_segment: MakeSegment, pull: Pull
) -> None:
    # KV-20
    transport = PaperTransport()
    agent, attachments = make_agent(transport, make_segment("p"), make_segment("d"))

    with attachments, pytest.raises(InvalidRequest):
        await agent.pull(pull)

    assert transport.copies == []
    assert agent.stats.num_active_pulls == 0


async def test_engine_that_detaches_during_a_pull_stays_mapped_until_its_end(
    make_segment: MakeSegment,
) -> None:
    transport = PaperTransport()
    transport.may_end.clear()
    agent, attachments = make_agent(transport, make_segment("p"), make_segment("d"))
    pulling = asyncio.create_task(agent.pull(PULL))
    await transport.has_begun.wait()

    attachments.close()
    assert len(agent.segments) == 0
    with pytest.raises(KvTransferFailed, match="not attached"):
        await agent.pull(PULL)
    transport.may_end.set()

    assert (await pulling).num_bytes == 15000


async def test_draining_waits_for_the_pulls_in_flight(make_segment: MakeSegment) -> None:
    transport = PaperTransport()
    transport.may_end.clear()
    agent, attachments = make_agent(transport, make_segment("p"), make_segment("d"))
    with attachments:
        pulling = asyncio.create_task(agent.pull(PULL))
        await transport.has_begun.wait()

        draining = asyncio.create_task(agent.drain())
        await asyncio.sleep(0)
        assert not draining.done()
        assert not agent.draining.is_set()
        transport.may_end.set()
        await pulling
        await draining

    assert agent.draining.is_set()


class StubbornTransport(PaperTransport):
    """Does not leave the blocks alone at once when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.was_told = asyncio.Event()

    async def copy(self, source: Segment, destination: Segment, runs: Sequence[BlockRun]) -> int:
        try:
            return await super().copy(source, destination, runs)
        except asyncio.CancelledError:
            self.was_told.set()
            await self.may_end.wait()
            raise


async def test_drain_out_of_time_is_over_when_the_pulls_are(make_segment: MakeSegment) -> None:
    # KV-21: with the end of the drain the port is closed, which workers take for the agent's end.
    transport = StubbornTransport()
    transport.may_end.clear()
    agent, attachments = make_agent(transport, make_segment("p"), make_segment("d"))
    with attachments:
        pulling = asyncio.create_task(agent.pull(PULL))
        await transport.has_begun.wait()
        draining = asyncio.create_task(agent.drain())
        await asyncio.sleep(0)

        draining.cancel()
        await transport.was_told.wait()
        assert not draining.done()
        with pytest.raises(WorkerUnavailable):
            await agent.pull(PULL)
        transport.may_end.set()

        await asyncio.wait([draining])
        assert draining.cancelled()
        assert agent.stats.num_active_pulls == 0
        with pytest.raises(WorkerUnavailable):
            await pulling


async def test_after_a_drain_nothing_is_copied_any_more(make_segment: MakeSegment) -> None:
    transport = PaperTransport()
    agent, attachments = make_agent(transport, make_segment("p"), make_segment("d"))
    with attachments:
        await agent.drain()

        with pytest.raises(WorkerUnavailable):
            await agent.pull(PULL)

    assert transport.copies == []


def test_pace_of_nothing_is_zero() -> None:
    assert Moved(0, 0, 0.0).gb_per_s == 0
    assert Moved(2_000_000_000, 1, 0.5).gb_per_s == 4
