"""Pulls of blocks that an engine is still filling, on its machine and from another one."""

import asyncio
import mmap
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.block_marks import BlockMarks
from kv_transfer_svc.pulls import Moved, Pull
from kv_transfer_svc.segments import Segment, SegmentSpec
from kv_transfer_svc.tls import TlsFiles
from kv_transfer_svc.transports import block_server, block_wire
from mesh.errors import InvalidRequest, KvTransferFailed
from tests.transfer_agents import RunningAgent, start_agent
from tests.worker_wire import wait_until

NUM_BLOCKS = 8
BLOCK_BYTES = 4096
SOURCE_IDS = [2, 3, 7]
DESTINATION_IDS = [6, 5, 4]


class Engine:
    """A segment with marks, and who sets them."""

    def __init__(self, folder: Path, engine_id: str) -> None:
        self.path = folder / engine_id
        size = NUM_BLOCKS * BLOCK_BYTES
        blocks = np.random.default_rng(ord(engine_id)).bytes(size)
        self.path.write_bytes(blocks + bytes(BlockMarks.num_bytes(NUM_BLOCKS)))
        with self.path.open("r+b") as file:
            marks = mmap.mmap(file.fileno(), BlockMarks.num_bytes(NUM_BLOCKS), offset=size)
        self.marks = BlockMarks(marks, NUM_BLOCKS)
        for block_id in range(NUM_BLOCKS):
            self.marks.generations[block_id] = 1
        self.spec = SegmentSpec(
            engine_id,
            str(self.path),
            BLOCK_BYTES,
            NUM_BLOCKS,
            "f1",
            generations_offset=size,
            has_marks=True,
        )

    def fill(self, *block_ids: int, next_token_id: int | None = None) -> None:
        for block_id in block_ids:
            self.marks.filled[block_id] = self.marks.generations[block_id]
        if next_token_id is not None:
            self.marks.next_tokens[block_ids[-1]] = next_token_id + 1
        self.marks.bell.ring()

    def reuse(self, block_id: int) -> None:
        self.marks.generations[block_id] += 1
        self.marks.bell.ring()

    def block(self, block_id: int) -> bytes:
        return self.path.read_bytes()[block_id * BLOCK_BYTES : (block_id + 1) * BLOCK_BYTES]


class Rig:
    """Engine `p`, on this machine or another one, and engine `d` here."""

    def __init__(self, folder: Path, here: RunningAgent, there: RunningAgent) -> None:
        self.source, self.destination = Engine(folder, "p"), Engine(folder, "d")
        self.agent, self.there = here.agent, there
        self.attachment = there.agent.segments.attached(self.source.spec)
        self.segment: Segment = self.attachment.__enter__()
        here.attach(self.destination.spec)

    def start(self, request_id: str = "r", **changes: object) -> asyncio.Task[Moved]:
        pull = Pull(
            "p",
            SOURCE_IDS,
            "d",
            DESTINATION_IDS,
            source_generations=[1, 1, 1],
            source_address=self.there.address,
            request_id=request_id,
            follows=True,
        )
        return asyncio.create_task(self.agent.pull(replace(pull, **changes)))  # type: ignore[arg-type]

    async def until_moved(self, num_blocks: int) -> None:
        await wait_until(lambda: self.agent.num_bytes == num_blocks * BLOCK_BYTES)

    def leave(self) -> None:
        self.attachment.__exit__(None, None, None)


@asynccontextmanager
async def machines_with(folder: Path, **settings: Any) -> AsyncIterator[Rig]:
    """Two machines."""
    async with AsyncExitStack() as stack:
        agents = [await start_agent(**settings) for _ in range(2)]
        for agent in agents:
            stack.push_async_callback(agent.stop)
        yield Rig(folder, *agents)


@pytest.fixture(params=[1, 2], ids=["one machine", "two machines"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        agents = [await start_agent() for _ in range(request.param)]
        for agent in agents:
            stack.push_async_callback(agent.stop)
        yield Rig(tmp_path, agents[0], agents[-1])


async def test_blocks_are_copied_as_they_are_filled_and_the_token_ends_it(rig: Rig) -> None:
    pulling = rig.start()

    rig.source.fill(2)
    await rig.until_moved(1)
    assert rig.destination.block(6) == rig.source.block(2)
    rig.source.fill(3)
    await rig.until_moved(2)
    rig.source.fill(7)
    await asyncio.sleep(0.05)
    assert not pulling.done()
    rig.source.fill(7, next_token_id=0)
    moved = await asyncio.wait_for(pulling, 20)

    assert (moved.num_bytes, moved.next_token_id) == (3 * BLOCK_BYTES, 0)
    assert rig.destination.block(5) == rig.source.block(3)
    assert rig.destination.block(4) == rig.source.block(7)
    assert rig.agent.stats.num_pulls == 1


async def test_what_was_filled_before_is_not_waited_for(rig: Rig) -> None:
    rig.source.fill(2, 3, 7, next_token_id=41)

    moved = await asyncio.wait_for(rig.start(), 20)

    assert moved.next_token_id == 41
    assert rig.destination.block(4) == rig.source.block(7)


async def test_block_that_is_used_for_something_else_ends_the_pull(rig: Rig) -> None:
    # KV-20
    pulling = rig.start()
    rig.source.fill(2, 3)
    await rig.until_moved(2)

    rig.source.reuse(3)
    rig.source.fill(7, next_token_id=5)

    with pytest.raises(KvTransferFailed, match="reused 1 of the blocks"):
        await asyncio.wait_for(pulling, 20)


async def test_engine_that_leaves_ends_the_pull(rig: Rig) -> None:
    # KV-19
    pulling = rig.start()
    rig.source.fill(2)
    await rig.until_moved(1)

    rig.leave()

    with pytest.raises(KvTransferFailed, match="has left"):
        await asyncio.wait_for(pulling, 20)
    await wait_until(lambda: not rig.segment.is_mapped)


async def test_cancelled_pull_ends_and_is_asked_for_by_its_id(rig: Rig) -> None:
    # KV-16, KV-21
    given_up, other = rig.start("r1"), rig.start("r2")
    await wait_until(lambda: rig.agent.num_active_pulls("") == 2)
    assert rig.agent.num_active_pulls("r1") == 1

    given_up.cancel()

    await wait_until(lambda: rig.agent.num_active_pulls("r1") == 0)
    assert rig.agent.num_active_pulls("r2") == 1
    assert given_up.done()
    rig.source.fill(2, 3, 7, next_token_id=5)
    assert (await asyncio.wait_for(other, 20)).next_token_id == 5


async def test_pulls_that_wait_keep_no_other_waiting(rig: Rig) -> None:
    following = [rig.start(f"r{number}") for number in range(20)]
    await wait_until(lambda: rig.agent.num_active_pulls("") == 20)

    plain = rig.start("plain", follows=False)

    assert (await asyncio.wait_for(plain, 20)).num_bytes == 3 * BLOCK_BYTES
    assert not any(pull.done() for pull in following)
    rig.source.fill(2, 3, 7, next_token_id=5)
    await asyncio.wait_for(asyncio.gather(*following), 10)


async def test_pull_that_cannot_follow_is_refused(rig: Rig) -> None:
    with pytest.raises(KvTransferFailed, match="does not tell"):
        await rig.start(source_generations=[])
    with pytest.raises((InvalidRequest, KvTransferFailed), match="outside a segment"):
        await rig.start(source_block_ids=[2, 3, NUM_BLOCKS])
    rig.leave()
    rig.attachment = rig.there.agent.segments.attached(replace(rig.source.spec, has_marks=False))
    rig.attachment.__enter__()
    with pytest.raises(KvTransferFailed, match="does not tell"):
        await rig.start()


@pytest.mark.parametrize(("block_ids", "generations"), [([], []), ([2], []), ([2, 3], [1])])
async def test_blocks_without_their_generations_are_not_followed(
    rig: Rig, block_ids: list[int], generations: list[int]
) -> None:
    # KV-20: nothing would tell whether they are filled.
    network = rig.there.agent.network
    assert network is not None

    async with asyncio.timeout(20):
        with pytest.raises(InvalidRequest):
            await anext(network.fill_watch.follow("p", block_ids, generations))


async def test_prefill_that_takes_longer_than_a_stall_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # KV-19: the other agent says that it waits.
    monkeypatch.setattr(block_server, "_SIGNS_OF_LIFE", 20)
    async with machines_with(tmp_path, stall_timeout_s=1.5) as rig:
        pulling = rig.start()
        rig.source.fill(2)
        await rig.until_moved(1)

        done, _ = await asyncio.wait([pulling], timeout=2)

        assert not done
        rig.source.fill(3, 7, next_token_id=5)
        assert (await asyncio.wait_for(pulling, 20)).next_token_id == 5


async def test_blocks_are_followed_over_tls(
    tmp_path: Path, tls_files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_said_that_it_waits = threading.Event()
    send_waiting = block_wire.send_waiting

    def send(connection: socket.socket) -> None:
        send_waiting(connection)
        has_said_that_it_waits.set()

    monkeypatch.setattr(block_wire, "send_waiting", send)
    monkeypatch.setattr(block_server, "_SIGNS_OF_LIFE", 600)
    async with machines_with(tmp_path, stall_timeout_s=60, tls=tls_files) as rig:
        for generation in (1, 2):
            pulling = rig.start(source_generations=[generation] * 3)
            rig.source.fill(2)
            has_said_that_it_waits.clear()
            assert await asyncio.to_thread(has_said_that_it_waits.wait, 20)
            rig.source.fill(3, 7, next_token_id=generation)

            moved = await asyncio.wait_for(pulling, 20)

            assert moved.next_token_id == generation
            assert rig.destination.block(5) == rig.source.block(3)
            assert rig.destination.block(4) == rig.source.block(7)
            for block_id in SOURCE_IDS:
                rig.source.reuse(block_id)


async def test_agent_that_falls_silent_while_it_is_followed_ends_the_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # KV-19: SIGSTOP, or a network that swallows everything.
    monkeypatch.setattr(block_wire, "send_waiting", lambda connection: None)
    async with machines_with(tmp_path, stall_timeout_s=0.3) as rig:
        pulling = rig.start()
        rig.source.fill(2)

        with pytest.raises(KvTransferFailed, match="timed out"):
            await asyncio.wait_for(pulling, 20)


async def test_agent_lets_go_of_blocks_that_nobody_waits_for_any_more(rig: Rig) -> None:
    # KV-16
    pulling = rig.start()
    rig.source.fill(2)
    await rig.until_moved(1)

    pulling.cancel()
    await asyncio.wait([pulling])
    rig.leave()

    await wait_until(lambda: not rig.segment.is_mapped)


async def test_next_read_takes_the_connection_of_one_that_followed(tmp_path: Path) -> None:
    async with machines_with(tmp_path) as rig:
        for token_id in (1, 2):
            rig.source.fill(2, 3, 7, next_token_id=token_id)
            assert (await asyncio.wait_for(rig.start(), 20)).next_token_id == token_id
        await asyncio.wait_for(rig.start("plain", follows=False), 20)

        network = rig.there.agent.network
        assert network is not None
        assert len(network.block_server._connections) == 1


async def test_destination_is_told_by_its_own_marks(rig: Rig) -> None:
    marks = rig.destination.marks
    rig.source.fill(2, 3, 7, next_token_id=41)
    assert marks.token_after(DESTINATION_IDS) is None

    await asyncio.wait_for(rig.start(), 20)

    assert marks.token_after(DESTINATION_IDS) == 41
    assert marks.bell.count == 1
