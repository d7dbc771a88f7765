"""Pulls by Mooncake's Transfer Engine: with one on paper, and between two processes for real."""

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_transfer_svc.segments import SegmentSpec
from kv_transfer_svc.transports import mooncake as mooncake_module
from kv_transfer_svc.transports.mooncake import (
    INSTALL,
    MooncakeMissing,
    MooncakeTransport,
    open_transport,
)
from mesh.client import connect, mesh_errors
from mesh.errors import KvTransferFailed
from mesh.ports import find_free_ports
from mesh.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from tests.transfer_agents import RunningAgent, pull_from, read_blocks, start_agent

MakeSegment = Callable[..., SegmentSpec]
StartAgent = Callable[..., Any]
NUM_BLOCKS, BLOCK_BYTES = 64, 1 << 19


class PaperEngine:
    """Reads this process's memory, if it is registered; once the gate is open."""

    _registered: dict[int, int] = {}  # noqa: RUF012 - what all engines of the world expose

    def __init__(self, port: int) -> None:
        self._port = port
        self.gate = threading.Event()
        self.gate.set()
        self.reading = threading.Event()
        self.read = threading.Event()
        self.num_reads = 0
        # Called with the number of reads that there were before.
        self.before_read: Callable[[int], object] = lambda number: None

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return self._port

    def register_memory(self, address: int, num_bytes: int) -> int:
        self._registered[address] = num_bytes
        return 0

    def unregister_memory(self, address: int) -> int:
        del self._registered[address]
        return 0

    def batch_transfer_sync_read(
        self, peer: str, addresses: list[int], peer_addresses: list[int], lengths: list[int]
    ) -> int:
        self.reading.set()
        self.gate.wait()
        self.before_read(self.num_reads)
        self.num_reads += 1
        for address, peer_address, length in zip(addresses, peer_addresses, lengths, strict=True):
            if not self._is_registered(peer_address, length):
                return -1
            ctypes.memmove(address, peer_address, length)
        self.read.set()
        return 0

    def _is_registered(self, address: int, length: int) -> bool:
        return any(
            start <= address and address + length <= start + size
            for start, size in self._registered.items()
        )


@pytest.fixture
async def start() -> AsyncIterator[StartAgent]:
    async with AsyncExitStack() as stack:

        async def start_one(engine: PaperEngine | None, **options: Any) -> RunningAgent:
            transport = MooncakeTransport(engine, **options) if engine is not None else None
            agent = await start_agent(mooncake=transport)
            stack.push_async_callback(agent.stop)
            return agent

        yield start_one


async def test_scattered_blocks_arrive_in_pieces_and_no_others_change(
    start: StartAgent, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_module, "_STAGING_BYTES", 12_000)
    here, there = await start(PaperEngine(1)), await start(PaperEngine(2))
    source, destination = make_segment("p"), make_segment("d")
    there.attach(source)
    here.attach(destination)
    before = read_blocks(destination)

    moved = await here.agent.pull(pull_from(there, [3, 4, 9, 10, 11], [0, 1, 5, 6, 7]))

    after = read_blocks(destination)
    assert np.array_equal(after[[0, 1, 5, 6, 7]], read_blocks(source)[[3, 4, 9, 10, 11]])
    others = [2, 3, 4, *range(8, 16)]
    assert np.array_equal(after[others], before[others])
    assert moved.transport == "mooncake"


async def test_agent_without_a_transfer_engine_is_read_over_tcp(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    here, there = await start(PaperEngine(1)), await start(None)
    there.attach(make_segment("p"))
    here.attach(make_segment("d"))

    assert (await here.agent.pull(pull_from(there, [3], [0]))).transport == "tcp"


def with_generations(spec: SegmentSpec) -> SegmentSpec:
    with Path(spec.path).open("ab") as file:
        file.write(np.full(spec.num_blocks, 7, "<u4").tobytes())
    return replace(spec, generations_offset=spec.num_bytes)


def reuse(spec: SegmentSpec, block_id: int) -> None:
    """As the engine does before it writes to a block again."""
    assert spec.generations_offset is not None
    with Path(spec.path).open("r+b") as file:
        file.seek(spec.generations_offset + 4 * block_id)
        file.write((8).to_bytes(4, "little"))


@pytest.mark.parametrize("num_reads_before", [0, 2])
async def test_block_that_was_reused_before_or_during_a_read_fails_the_pull(
    start: StartAgent, make_segment: MakeSegment, num_reads_before: int
) -> None:
    # KV-21: generations are read first, then the blocks, then the generations again.
    engine = PaperEngine(1)
    here, there = await start(engine), await start(PaperEngine(2))
    source = with_generations(make_segment("p"))
    there.attach(source)
    here.attach(make_segment("d"))
    pull = replace(pull_from(there, [3, 4], [0, 1]), source_generations=[7, 7])
    assert (await here.agent.pull(pull)).num_bytes == 10_000

    engine.num_reads = 0
    engine.before_read = lambda number: reuse(source, 4) if number == num_reads_before else None
    with pytest.raises(KvTransferFailed, match="reused 1 of the blocks"):
        await here.agent.pull(pull)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_read_that_ends_late_writes_to_nobodys_blocks(
    start: StartAgent, make_segment: MakeSegment, is_cancelled: bool
) -> None:
    # KV-21: the peer was frozen, and thaws when the blocks are somebody else's.
    engine = PaperEngine(1)
    here = await start(engine, stall_timeout_s=60 if is_cancelled else 1)
    there = await start(PaperEngine(2))
    source, destination = make_segment("p"), make_segment("d")
    there.attach(source)
    here.attach(destination)
    before = read_blocks(destination)

    engine.gate.clear()
    pulling = asyncio.create_task(here.agent.pull(pull_from(there, [3], [0])))
    await asyncio.to_thread(engine.reading.wait, 20)
    if is_cancelled:
        pulling.cancel()
        await asyncio.wait([pulling])
        assert pulling.cancelled()
    else:
        with pytest.raises(KvTransferFailed, match=r"reading from .*: nothing for"):
            await pulling
    engine.gate.set()
    assert await asyncio.to_thread(engine.read.wait, 20)
    # Not into the memory that the late one had.
    engine.before_read = lambda number: None
    await here.agent.pull(pull_from(there, [5], [2]))

    after = read_blocks(destination)
    assert np.array_equal(after[[0, 1]], before[[0, 1]])
    assert np.array_equal(after[2], read_blocks(source)[5])


async def test_with_too_many_late_reads_blocks_come_over_tcp_until_those_have_ended(
    start: StartAgent, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_module, "_MAX_SPOILT", 1)
    engine = PaperEngine(1)
    here, there = await start(engine, stall_timeout_s=60), await start(PaperEngine(2))
    there.attach(make_segment("p"))
    here.attach(make_segment("d"))
    engine.gate.clear()
    pulling = asyncio.create_task(here.agent.pull(pull_from(there, [3], [0])))
    await asyncio.to_thread(engine.reading.wait, 20)
    # As by a client that goes away.
    pulling.cancel()
    await asyncio.wait([pulling])
    assert (await here.agent.pull(pull_from(there, [3], [0]))).transport == "tcp"

    engine.gate.set()

    mooncake = here.agent.network.mooncake
    async with asyncio.timeout(20):
        while not mooncake.is_usable:  # noqa: ASYNC110 - the thread that read tells the event loop
            await asyncio.sleep(0.01)
    assert (await here.agent.pull(pull_from(there, [3], [0]))).transport == "mooncake"
    assert len(mooncake._idle) == 1


async def test_late_read_that_fails_gives_its_memory_back_after_a_while(
    start: StartAgent, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was in flight with it may come yet."""
    monkeypatch.setattr(mooncake_module, "_QUARANTINE_S", 3600)
    engine = PaperEngine(1)
    here, there = await start(engine, stall_timeout_s=0.1), await start(PaperEngine(2))
    here.attach(make_segment("d"))
    with there.agent.segments.attached(make_segment("p")):
        engine.gate.clear()
        with pytest.raises(KvTransferFailed, match=r"nothing for"):
            await here.agent.pull(pull_from(there, [3], [0]))
    # Its source is not readable any more.
    mooncake = here.agent.network.mooncake
    engine.gate.set()

    async with asyncio.timeout(20):
        while mooncake._spoilt:  # noqa: ASYNC110 - the thread that read tells the event loop
            await asyncio.sleep(0.01)
    assert not mooncake._idle


async def test_engine_that_detaches_is_not_readable_any_more(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    here, there = await start(PaperEngine(1)), await start(PaperEngine(2), stall_timeout_s=0.01)
    here.attach(make_segment("d"))
    with there.agent.segments.attached(make_segment("p")) as segment:
        await here.agent.pull(pull_from(there, [3], [0]))
        assert segment.is_mapped

    with pytest.raises(KvTransferFailed):
        await here.agent.pull(pull_from(there, [3], [0]))
    async with asyncio.timeout(20):
        while segment.is_mapped:  # noqa: ASYNC110 - a timer of the event loop lets go of it
            await asyncio.sleep(0.01)


def test_missing_library_is_told_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)

    with pytest.raises(MooncakeMissing, match="no Mooncake Transfer Engine") as caught:
        open_transport("127.0.0.1", "tcp", "", num_reads=1, stall_timeout_s=1)

    assert INSTALL in str(caught.value)


@pytest.fixture
async def agents(tmp_path: Path) -> AsyncIterator[list[tuple[Any, str]]]:
    """Stub and address of one agent process with engine `d`, and of another with `p`."""
    if not is_installed():
        pytest.skip(INSTALL)
    async with AsyncExitStack() as stack:
        found = []
        for engine_id in ("d", "p"):
            address = f"127.0.0.1:{find_free_ports(1)[0]}"
            environment = {
                **os.environ,
                "PDMESH_LISTEN": address,
                "PDMESH_REMOTE_TRANSPORT": "mooncake",
                "PDMESH_LOG_LEVEL": "ERROR",
                "PDMESH_HOST_MEMORY_BYTES": "0",
            }
            process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-m", "kv_transfer_svc"],
                env=environment,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            channel = connect(address)
            stack.push_async_callback(channel.close)
            await asyncio.wait_for(channel.channel_ready(), 20)
            stub = kv_transfer_pb2_grpc.KvTransferServiceStub(channel)
            path = tmp_path / engine_id
            generations = np.full(NUM_BLOCKS, 7, "<u4").tobytes()
            await asyncio.to_thread(
                path.write_bytes, os.urandom(NUM_BLOCKS * BLOCK_BYTES) + generations
            )
            call = stub.AttachSegment(
                kv_transfer_pb2.AttachSegmentRequest(
                    engine_id=engine_id,
                    path=str(path),
                    block_bytes=BLOCK_BYTES,
                    num_blocks=NUM_BLOCKS,
                    layout_fingerprint="f",
                    generations_offset=NUM_BLOCKS * BLOCK_BYTES,
                )
            )
            stack.callback(call.cancel)
            await anext(aiter(call))
            found.append((stub, address))
        yield found


def is_installed() -> bool:
    try:
        import_module("mooncake.engine")
    except ImportError:
        return False
    return True


async def test_blocks_cross_from_one_process_to_another_unless_they_were_reused(
    agents: list[tuple[Any, str]], tmp_path: Path
) -> None:
    (here, _), (_, there) = agents
    order = np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()
    request = kv_transfer_pb2.PullRequest(
        source_engine_id="p",
        source_block_ids=order,
        source_generations=[7] * NUM_BLOCKS,
        destination_engine_id="d",
        destination_block_ids=range(NUM_BLOCKS),
        source_address=there,
    )
    spec = SegmentSpec("p", str(tmp_path / "p"), BLOCK_BYTES, NUM_BLOCKS, "f")
    spec = replace(spec, generations_offset=spec.num_bytes)

    with mesh_errors():
        await here.Pull(request, timeout=20)
    arrived = read_blocks(replace(spec, path=str(tmp_path / "d")))
    assert np.array_equal(arrived, read_blocks(spec)[order])

    reuse(spec, 9)
    with pytest.raises(KvTransferFailed, match="reused 1 of the blocks"), mesh_errors():
        await here.Pull(request, timeout=20)
