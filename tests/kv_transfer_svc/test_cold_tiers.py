"""Host memory and disk behind the engines: bounded, checked, and warm after a restart."""

import asyncio
import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_transfer_svc.agent import Store
from kv_transfer_svc.segments import Segment, SegmentSpec
from kv_transfer_svc.tiers import block_file, cold_tiers
from kv_transfer_svc.tiers.cold_tiers import Loaded
from kv_transfer_svc.tiers.disk_store import DiskStore
from mesh import metrics
from mesh.errors import InvalidRequest, KvTransferFailed
from tests.transfer_agents import RunningAgent

MakeSegment = Callable[..., SegmentSpec]
StartAgent = Callable[..., Any]

BLOCK_BYTES = 5000
GB = 1 << 30


def keys_of(*names: object) -> list[bytes]:
    return [hashlib.sha256(repr(name).encode()).digest()[:16] for name in names]


def attach(agent: RunningAgent, spec: SegmentSpec, generations: list[int] | None = None) -> Segment:
    """With a generation for each block, 1 by default."""
    with Path(spec.path).open("ab") as file:
        file.write(np.array(generations or [1] * spec.num_blocks, "<u4").tobytes())
    return agent.attach(replace(spec, generations_offset=spec.num_bytes))


async def store(agent: RunningAgent, keys: list[bytes], block_ids: list[int]) -> int:
    return await agent.agent.store(Store("p", "m", keys, block_ids, [1] * len(keys)))


async def load(agent: RunningAgent, keys: list[bytes], first_block: int = 0) -> Loaded:
    return await agent.agent.load("d", keys, list(range(first_block, first_block + len(keys))))


def files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def bytes_of(segment: Segment, *block_ids: int) -> Any:
    return segment.blocks[list(block_ids)].copy()


async def test_stored_blocks_come_back_to_another_engine(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    agent = await start(host_memory_bytes=GB)
    source, destination = attach(agent, make_segment("p")), attach(agent, make_segment("d"))
    keys = keys_of(*range(5))

    assert await store(agent, keys, [3, 4, 9, 1, 0]) == 5
    loaded = await load(agent, keys, 6)

    assert loaded == Loaded(5, 0)
    assert np.array_equal(bytes_of(destination, *range(6, 11)), bytes_of(source, 3, 4, 9, 1, 0))
    assert agent.agent.tiers.stats.num_host_hits == 5
    assert [change[1:3] for change in agent.changes] == [("host", [key]) for key in keys]


async def test_only_the_leading_run_comes_back(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    agent = await start(host_memory_bytes=GB)
    attach(agent, make_segment("p"))
    destination = attach(agent, make_segment("d"))
    before = bytes_of(destination, *range(16))
    keys = keys_of(*range(5))
    await store(agent, [*keys[:2], *keys[3:]], [0, 1, 3, 4])

    assert await load(agent, keys) == Loaded(2, 0)
    assert await load(agent, keys[2:]) == Loaded(0, 0)

    assert np.array_equal(bytes_of(destination, *range(2, 16)), before[2:])


async def test_block_that_is_there_is_not_copied_again(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    agent = await start(host_memory_bytes=GB)
    attach(agent, make_segment("p"))
    keys = keys_of(*range(3))
    await store(agent, keys, [0, 1, 2])

    assert await store(agent, keys_of(*range(4)), [5, 6, 7, 8]) == 1


async def test_block_that_the_engine_has_reused_is_not_stored(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    # KV-08
    agent = await start(host_memory_bytes=GB)
    attach(agent, make_segment("p"), [1, 2, 1] + [1] * 13)
    attach(agent, make_segment("d"))
    keys = keys_of(*range(3))

    assert await store(agent, keys, [0, 1, 2]) == 2
    assert await load(agent, keys) == Loaded(1, 0)


async def test_block_reused_while_it_is_copied_is_not_stored(
    start: StartAgent, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # KV-08
    agent = await start(host_memory_bytes=GB)
    source = attach(agent, make_segment("p"))
    check, checked = Segment.check_generations, []

    def check_then_reuse(segment: Segment, *arguments: Any) -> None:
        check(segment, *arguments)
        checked.append(segment)
        assert source._generations is not None
        source._generations[0] = 2

    monkeypatch.setattr(Segment, "check_generations", check_then_reuse)

    assert await store(agent, keys_of(0), [0]) == 0
    assert len(checked) == 1


async def test_host_tier_is_bounded_and_drops_what_was_used_least_recently(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    agent = await start(host_memory_bytes=3 * BLOCK_BYTES + 100)
    attach(agent, make_segment("p"))
    attach(agent, make_segment("d"))
    keys = keys_of(*range(4))
    await store(agent, keys[:3], [0, 1, 2])
    await load(agent, keys[:1])

    await store(agent, keys[3:], [3])

    assert await load(agent, keys[:1]) == Loaded(1, 0)
    assert await load(agent, keys[1:2]) == Loaded(0, 0)
    assert agent.agent.tiers.host.num_bytes == 3 * BLOCK_BYTES
    assert ("m", "host", (), [keys[1]]) in agent.changes


async def test_disk_tier_survives_a_restart(
    start: StartAgent, make_segment: MakeSegment, tmp_path: Path
) -> None:
    agent = await start(host_memory_bytes=GB, disk=DiskStore(tmp_path, GB))
    spec = make_segment("p")
    source = attach(agent, spec)
    keys = keys_of(*range(5))
    await store(agent, keys, [3, 4, 9, 1, 0])
    expected = bytes_of(source, 3, 4, 9, 1, 0)
    await agent.agent.drain()
    await agent.stop()

    again = await start(host_memory_bytes=GB, disk=DiskStore(tmp_path, GB))
    destination = attach(again, make_segment("d"))

    assert [(model, tier, list(stored)) for model, tier, stored, _ in again.changes] == [
        ("m", "disk", keys)
    ]
    assert await load(again, keys) == Loaded(5, 5)
    assert np.array_equal(bytes_of(destination, *range(5)), expected)
    assert again.agent.tiers.stats.num_disk_hits == 5


async def test_blocks_go_to_disk_by_themselves(
    start: StartAgent, make_segment: MakeSegment, tmp_path: Path
) -> None:
    disk = DiskStore(tmp_path, GB)
    agent = await start(disk=disk)
    attach(agent, make_segment("p"))

    await store(agent, keys_of(*range(5)), [0, 1, 2, 3, 4])

    async with asyncio.timeout(20):
        while len(disk) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    [path] = files_in(tmp_path)
    assert path.suffix == block_file.SUFFIX
    assert await store(agent, keys_of(*range(5)), [5, 6, 7, 8, 9]) == 0
    # Of a host tier that there is not, there is nothing to tell.
    assert {tier for _, tier, *_ in agent.changes} == {"disk"}


async def prepared(
    start: StartAgent, make_segment: MakeSegment, folder: Path, keys: list[bytes]
) -> tuple[Path, Any]:
    """A file on disk with the blocks of `keys`, and their bytes."""
    agent = await start(disk=DiskStore(folder, GB))
    source = attach(agent, make_segment("p"))
    await store(agent, keys, list(range(len(keys))))
    await agent.agent.drain()
    await agent.stop()
    [path] = files_in(folder)
    return path, bytes_of_file(source, len(keys))


def bytes_of_file(segment: Segment, num_blocks: int) -> Any:
    return np.frombuffer(Path(segment.spec.path).read_bytes(), np.uint8)[
        : num_blocks * BLOCK_BYTES
    ].reshape(num_blocks, BLOCK_BYTES)


def damaged_count() -> float:
    for line in metrics.render()[0].decode().splitlines():
        if line.startswith("pdmesh_kv_tier_damaged"):
            return float(line.rpartition(" ")[2])
    return 0.0


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda data: data[:-1], id="truncated"),
        pytest.param(lambda data: data[:10], id="almost empty"),
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: b"X" + data[1:], id="other magic"),
        pytest.param(lambda data: data[:40] + b"!" + data[41:], id="header"),
        pytest.param(lambda data: data + b"more", id="too long"),
    ],
)
async def test_file_that_is_not_whole_is_a_miss_and_deleted(
    start: StartAgent,
    make_segment: MakeSegment,
    tmp_path: Path,
    harm: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = keys_of(*range(4))
    path, _ = await prepared(start, make_segment, tmp_path, keys)
    path.write_bytes(harm(path.read_bytes()))
    before = damaged_count()

    agent = await start(disk=DiskStore(tmp_path, GB))
    attach(agent, make_segment("d"))

    assert await load(agent, keys) == Loaded(0, 0)
    assert not path.exists()
    assert damaged_count() == before + 1
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("is_cut", [True, False])
async def test_block_that_was_damaged_while_the_agent_ran_is_a_miss(
    start: StartAgent, make_segment: MakeSegment, tmp_path: Path, is_cut: bool
) -> None:
    keys = keys_of(*range(4))
    path, expected = await prepared(start, make_segment, tmp_path, keys)
    agent = await start(disk=DiskStore(tmp_path, GB))
    destination = attach(agent, make_segment("d"))
    data = bytearray(path.read_bytes())
    if is_cut:
        del data[-2 * BLOCK_BYTES + 100 :]
    else:
        data[-2 * BLOCK_BYTES + 100] ^= 1
    path.write_bytes(data)
    before = damaged_count()

    assert await load(agent, keys) == Loaded(2, 2)

    assert np.array_equal(bytes_of(destination, 0, 1), expected[:2])
    assert damaged_count() == before + 1
    assert await load(agent, keys) == Loaded(0, 0)
    assert not path.exists()
    assert agent.changes[-1][:2] == ("m", "disk")
    assert list(agent.changes[-1][3]) == keys


@pytest.mark.parametrize("damaged", [0, 5, 19, 20, 39])
async def test_blocks_behind_a_damaged_one_do_not_count(
    start: StartAgent, make_segment: MakeSegment, tmp_path: Path, damaged: int
) -> None:
    """Several threads fill so many blocks, and those behind it may have been filled by then."""
    num_blocks = 40
    keys = keys_of(*range(num_blocks))
    agent = await start(disk=DiskStore(tmp_path, GB))
    source = attach(agent, make_segment("p", num_blocks))
    await store(agent, keys, list(range(num_blocks)))
    expected = bytes_of(source, *range(num_blocks))
    await agent.agent.tiers.flush()
    destination = attach(agent, make_segment("d", num_blocks))
    assert await load(agent, keys) == Loaded(num_blocks, num_blocks)
    assert np.array_equal(bytes_of(destination, *range(num_blocks)), expected)
    [path] = files_in(tmp_path)
    data = bytearray(path.read_bytes())
    data[(damaged - num_blocks) * BLOCK_BYTES + 100] ^= 1
    path.write_bytes(data)

    assert await load(agent, keys) == Loaded(damaged, damaged)

    assert not path.exists()


async def test_load_does_not_wait_behind_what_is_stored(
    start: StartAgent, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await start(host_memory_bytes=GB)
    attach(agent, make_segment("p"))
    attach(agent, make_segment("d"))
    await store(agent, keys_of("here"), [0])
    begun, may_go_on = threading.Semaphore(0), threading.Event()

    def slow_copy(*arguments: Any) -> None:
        begun.release()
        assert may_go_on.wait(10)

    monkeypatch.setattr(cold_tiers, "_copy", slow_copy)
    storing = [asyncio.create_task(store(agent, keys_of(name), [1])) for name in range(4)]
    for _ in range(2):
        await asyncio.to_thread(begun.acquire, timeout=20)

    try:
        async with asyncio.timeout(20):
            assert await load(agent, keys_of("here")) == Loaded(1, 0)
    finally:
        may_go_on.set()
        await asyncio.gather(*storing)


async def test_files_used_last_are_read_ahead_after_a_restart(
    start: StartAgent, make_segment: MakeSegment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await start(disk=DiskStore(tmp_path, GB))
    attach(agent, make_segment("p"))
    attach(agent, make_segment("d"))
    for number in range(3):
        await store(agent, keys_of(number), [number])
        await agent.agent.tiers.flush()
    await load(agent, keys_of(0))
    await agent.stop()
    ahead: queue.Queue[Sequence[bytes]] = queue.Queue()
    monkeypatch.setattr(block_file, "read_ahead", lambda file: ahead.put(file.keys))

    again = await start(host_memory_bytes=2 * 10_000, disk=DiskStore(tmp_path, GB))

    for key in keys_of(0, 2):
        assert await asyncio.to_thread(ahead.get, timeout=20) == (key,)
    await again.stop()
    assert ahead.empty()


async def test_what_a_crash_left_half_written_is_removed(start: StartAgent, tmp_path: Path) -> None:
    (tmp_path / "abc.tmp").write_bytes(b"half")

    agent = await start(disk=DiskStore(tmp_path, GB))

    assert files_in(tmp_path) == []
    assert agent.changes == []


async def test_disk_tier_is_bounded_and_drops_the_oldest_file(
    start: StartAgent, make_segment: MakeSegment, tmp_path: Path
) -> None:
    disk = DiskStore(tmp_path, 3 * (2 * BLOCK_BYTES + 4096))
    agent = await start(disk=disk)
    attach(agent, make_segment("p"))
    attach(agent, make_segment("d"))
    groups = [keys_of(2 * n, 2 * n + 1) for n in range(4)]
    for number, keys in enumerate(groups[:3]):
        await store(agent, keys, [2 * number, 2 * number + 1])
        await agent.agent.tiers.flush()
    await load(agent, groups[0])

    await store(agent, groups[3], [6, 7])
    await agent.agent.tiers.flush()

    assert [await load(agent, keys) for keys in groups] == [
        Loaded(2, 2),
        Loaded(0, 0),
        Loaded(2, 2),
        Loaded(2, 2),
    ]
    assert len(files_in(tmp_path)) == 3
    assert disk.num_bytes <= disk.max_bytes
    assert ("m", "disk", (), tuple(groups[1])) in agent.changes


async def test_disk_that_is_full_costs_the_tier_and_nothing_else(
    start: StartAgent,
    make_segment: MakeSegment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = await start(host_memory_bytes=GB, disk=DiskStore(tmp_path, GB))
    attach(agent, make_segment("p"))
    attach(agent, make_segment("d"))

    def no_space(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    keys = keys_of(1, 2)
    await store(agent, keys, [1, 2])
    await agent.agent.tiers.flush()

    assert files_in(tmp_path) == []
    assert await load(agent, keys) == Loaded(2, 0)


async def test_files_that_cannot_be_deleted_cost_their_room_and_nothing_else(
    start: StartAgent,
    make_segment: MakeSegment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = keys_of(*range(4))
    path, _ = await prepared(start, make_segment, tmp_path, keys)
    (tmp_path / "half.kv").write_bytes(b"half")

    def read_only(*arguments: Any, **settings: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    # Room for one file.
    agent = await start(disk=DiskStore(tmp_path, path.stat().st_size))
    attach(agent, make_segment("p2"))
    attach(agent, make_segment("d"))
    newer, newest = keys_of(5), keys_of(6)
    async with asyncio.timeout(20):
        for block_id, one in enumerate((newer, newest)):
            await agent.agent.store(Store("p2", "m", one, [block_id], [1]))
            await agent.agent.tiers.flush()

    found = [await load(agent, one) for one in (keys, newer, newest)]
    monkeypatch.undo()
    assert found == [Loaded(0, 0), Loaded(1, 1), Loaded(1, 1)]


async def test_blocks_of_another_layout_are_a_miss(
    start: StartAgent, make_segment: MakeSegment, tmp_path: Path
) -> None:
    # KV-25, though keys of different layouts are different
    keys = keys_of(*range(2))
    await prepared(start, make_segment, tmp_path, keys)
    agent = await start(disk=DiskStore(tmp_path, GB))
    attach(agent, make_segment("d", fingerprint="f2"))

    assert await load(agent, keys) == Loaded(0, 0)


async def test_cancelled_load_writes_nothing_after_its_end(
    start: StartAgent, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # KV-21
    agent = await start(host_memory_bytes=GB)
    attach(agent, make_segment("p"))
    destination = attach(agent, make_segment("d"))
    keys = keys_of(*range(4))
    await store(agent, keys, [0, 1, 2, 3])
    before = bytes_of(destination, *range(16))
    has_begun, may_go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        has_begun.set()
        assert may_go_on.wait(10)

    monkeypatch.setattr(Segment, "make_resident", slow)
    loading = asyncio.create_task(load(agent, keys))
    await asyncio.to_thread(has_begun.wait)

    loading.cancel()
    await asyncio.sleep(0)
    assert agent.agent.stats.num_active_pulls == 1
    may_go_on.set()
    await asyncio.wait([loading])

    assert agent.agent.stats.num_active_pulls == 0
    assert np.array_equal(bytes_of(destination, *range(1, 16)), before[1:])


async def test_what_cannot_be_asked_is_refused(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    agent = await start(host_memory_bytes=GB)
    attach(agent, make_segment("p"))
    attach(agent, make_segment("d"))
    keys = keys_of(1, 2)

    with pytest.raises(InvalidRequest, match="1 blocks for 2 keys"):
        await agent.agent.load("d", keys, [1])
    with pytest.raises(InvalidRequest, match="outside a segment"):
        await agent.agent.load("d", keys, [1, 16])
    with pytest.raises(InvalidRequest, match="named twice"):
        await agent.agent.load("d", keys, [1, 1])
    with pytest.raises(InvalidRequest, match="1 generations for 2 keys"):
        await agent.agent.store(Store("p", "m", keys, [1, 2], [1]))
    with pytest.raises(KvTransferFailed, match="not attached"):
        await agent.agent.load("x", keys, [1, 2])


async def test_agent_without_tiers_has_nothing(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    agent = await start()
    attach(agent, make_segment("p"))
    attach(agent, make_segment("d"))

    assert await store(agent, keys_of(1), [1]) == 0
    assert await load(agent, keys_of(1)) == Loaded(0, 0)
