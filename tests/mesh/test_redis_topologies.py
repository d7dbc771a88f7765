"""Sentinel and Cluster: the index and the registry work on several servers too."""

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import RedisError

from gateway.keys.model import KeyGroup, Limits
from gateway.keys.stores import RedisStore
from gateway.limits.redis_limits import RedisLimits
from gateway.limits.scopes import Scope
from gateway.limits.scripts import scope_keys
from mesh.block_index import BlockIndex, PrefixHit
from mesh.block_publisher import BlockPublisher
from mesh.ports import find_free_ports
from mesh.redis_client import MeshRedis, connect_redis
from mesh.redis_urls import SeveralServers, parse_several
from mesh.registry import WorkerLoad, WorkerRegistry
from tests.loop_clock import LoopClock
from tests.paper_workers import registered
from tests.valkey import server_binary

MODEL = "smol"


class Changes:
    def __init__(self, stored: list[bytes]) -> None:
        self.stored = stored
        self.removed: list[bytes] = []


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16) for number in numbers]


@contextmanager
def running_server(folder: Path, port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir()
    command = [str(server_binary()), *options, "--port", str(port), "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _wait_until_listening(port, process)
        yield process
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def _wait_until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    ends_at = time.monotonic() + 20
    while time.monotonic() < ends_at:
        assert process.poll() is None, "the server has ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"nobody listens on port {port}")


async def ask(port: int, *command: str | int) -> Any:
    """One command to one server, of those that only operators use."""
    client: Any = redis.asyncio.Redis(port=port)
    try:
        return await client.execute_command(*command)
    finally:
        await client.aclose()


async def check_registry_and_index(client: MeshRedis) -> None:
    """What workers and schedulers do with Redis, once."""
    registry, index = WorkerRegistry(client), BlockIndex(client)
    worker = registered("d0")
    await registry.put(worker.record, WorkerLoad(100, 100), ttl_s=30)
    assert [one.record.worker_id for one in await registry.list()] == ["d0"]

    assert await index.publish(MODEL, "d0", "1", keys(*range(600)), []) == 2
    assert await index.publish(MODEL, "d0", "1", keys(700), keys(3)) == 3
    assert await index.longest_prefix(MODEL, keys(0, 1, 2, 3)) == {"d0@1": PrefixHit(3)}
    assert (await index.state(MODEL)).seqs == {"d0@1#device": 3}
    assert [event.seq for event in await index.events_after(MODEL, "0-0")] == [1, 2, 3]
    cursor, found = 1, set[bytes]()
    first = True
    while first or cursor:
        cursor, page = await index.blocks_of(MODEL, "d0@1#device", 0 if first else cursor)
        found.update(page)
        first = False
    assert found == set(keys(*range(600), 700)) - set(keys(3))
    assert await index.renew(MODEL, "d0", "1") == 3
    await index.drop_worker(MODEL, "d0", "1")
    assert await index.longest_prefix(MODEL, keys(0)) == {}
    await registry.remove("d0", "1")


@pytest.fixture
async def cluster_url(tmp_path: Path) -> AsyncIterator[str]:
    """Three nodes; the models' hash tags lie on different ones."""
    free = find_free_ports(6)
    ports, bus_ports = free[:3], free[3:]
    options = ("--cluster-enabled", "yes", "--save", "", "--cluster-require-full-coverage", "no")
    # Left to themselves, nodes add 10,000 to their ports, where others' connections begin.
    a, b, c = ((*options, "--cluster-port", str(port)) for port in bus_ports)
    with (
        running_server(tmp_path / "a", ports[0], *a),
        running_server(tmp_path / "b", ports[1], *b),
        running_server(tmp_path / "c", ports[2], *c),
    ):
        for number, port in enumerate(ports):
            first, last = number * 5461, (number + 1) * 5461 if number < 2 else 16384
            await ask(port, "CLUSTER", "ADDSLOTSRANGE", first, last - 1)
            await ask(ports[0], "CLUSTER", "MEET", "127.0.0.1", port, bus_ports[number])
        async with asyncio.timeout(30):
            for port in ports:
                # Nodes tell each other, and us when asked.
                while not await _is_whole(port):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        yield f"redis+cluster://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"


async def _is_whole(port: int) -> bool:
    info: bytes = await ask(port, "CLUSTER", "INFO")
    return b"cluster_state:ok" in info and b"cluster_slots_ok:16384" in info


async def check_limits_and_keys(client: MeshRedis) -> None:
    """A decision touches the keys of a key and of its group, which lie in one slot."""
    limits = RedisLimits(client, lease_ms=1000)
    once = Limits(requests_per_minute=1, max_concurrency=1)
    for number in range(12):
        group = f"group-{number}"
        scopes = [Scope(scope_keys(group, "k"), once, "k"), Scope(scope_keys(group), once, "g")]
        assert (await limits.admit("a", 1, scopes)).is_admitted
        assert not (await limits.admit("b", 1, scopes)).is_admitted
        await limits.renew(scopes[0].keys.slots, ["a"])
        await limits.settle("a", 0, scopes)
    store = RedisStore(client)
    await store.change(lambda book: book.with_group("lab", KeyGroup()))
    assert (await store.read()).groups == {"lab": KeyGroup()}


async def test_index_registry_limits_and_keys_work_on_a_cluster(cluster_url: str) -> None:
    client = connect_redis(cluster_url, timeout_s=20)
    try:
        await check_registry_and_index(client)
        # Each model's keys lie in one slot, and models on all nodes.
        index = BlockIndex(client)
        for number in range(12):
            await index.publish(f"model-{number}", "w", "1", keys(1, 2), [])
            found = await index.longest_prefix(f"model-{number}", keys(1, 2))
            assert found == {"w@1": PrefixHit(2)}
        await check_limits_and_keys(client)
    finally:
        await client.aclose()


async def check_a_crowd(url: str) -> None:
    """More commands at once than there are connections."""
    client = connect_redis(url, timeout_s=20)
    try:
        await client.ping()
        assert await asyncio.gather(*(client.get("none") for _ in range(300))) == [None] * 300
        assert not client.breaker.is_open
    finally:
        await client.aclose()


async def test_a_crowd_of_commands_waits_for_its_turn_on_a_cluster(cluster_url: str) -> None:
    await check_a_crowd(cluster_url)


async def test_first_commands_to_a_cluster_may_come_together(cluster_url: str) -> None:
    client = connect_redis(cluster_url, timeout_s=20)
    try:
        assert await asyncio.gather(*(client.get("none") for _ in range(20))) == [None] * 20
    finally:
        await client.aclose()


async def test_a_crowd_of_commands_waits_for_its_turn_by_sentinel(tmp_path: Path) -> None:
    primary, sentinel = find_free_ports(2)
    configuration = tmp_path / "sentinel.conf"
    configuration.write_text(f"sentinel monitor mesh 127.0.0.1 {primary} 1\n")
    with (
        running_server(tmp_path / "p", primary, "--save", ""),
        running_server(tmp_path / "q", sentinel, str(configuration), "--sentinel"),
    ):
        await check_a_crowd(f"redis+sentinel://127.0.0.1:{sentinel}/mesh")


async def test_unreachable_cluster_and_sentinel_fail_within_bounds() -> None:
    [port] = find_free_ports(1)
    for url in (f"redis+cluster://127.0.0.1:{port}", f"redis+sentinel://127.0.0.1:{port}/mesh"):
        client = connect_redis(url, timeout_s=0.2)
        async with LoopClock() as clock:
            with pytest.raises(RedisError):
                await BlockIndex(client).longest_prefix(MODEL, keys(1))
        assert clock.now_s < 2
        await client.aclose()


# RD-05
async def test_sentinel_failover_is_followed_and_the_index_is_whole_again(tmp_path: Path) -> None:
    primary, secondary, sentinel = find_free_ports(3)
    configuration = tmp_path / "sentinel.conf"
    configuration.write_text(
        f"sentinel monitor mesh 127.0.0.1 {primary} 1\n"
        "sentinel down-after-milliseconds mesh 500\n"
        "sentinel failover-timeout mesh 2000\n"
    )
    with (
        running_server(tmp_path / "p", primary, "--save", "") as primary_process,
        running_server(
            tmp_path / "s", secondary, "--save", "", "--replicaof", f"127.0.0.1 {primary}"
        ),
        running_server(tmp_path / "q", sentinel, str(configuration), "--sentinel"),
    ):
        client = connect_redis(
            f"redis+sentinel://127.0.0.1:{sentinel}/mesh", timeout_s=0.3, cooldown_s=0.3
        )
        index = BlockIndex(client)
        await _until_sentinel_knows_the_replica(sentinel)
        async with BlockPublisher(
            index, MODEL, "w", "1", renew_s=0.2, retry_delay_s=0.2
        ) as publisher:
            publisher.offer(Changes(keys(1)))
            await _until_found(index, keys(1, 2), PrefixHit(1))

            primary_process.kill()
            publisher.offer(Changes(keys(2)))

            await _until_found(index, keys(1, 2), PrefixHit(2))
        await client.aclose()


async def _until_sentinel_knows_the_replica(port: int) -> None:
    async with asyncio.timeout(30):
        while not await ask(port, "SENTINEL", "REPLICAS", "mesh"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def _until_found(index: BlockIndex, chain: list[bytes], hit: PrefixHit) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                if await index.longest_prefix(MODEL, chain) == {"w@1": hit}:
                    return
            except RedisError:
                # The failover is under way.
                pass
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://localhost:6379/0", None),
        ("rediss://localhost:6379/0", None),
        ("unix:///run/redis.sock", None),
        (
            "redis+sentinel://a:1,b/mymaster/2",
            SeveralServers("sentinel", (("a", 1), ("b", 26379)), False, service="mymaster", db=2),
        ),
        (
            "rediss+sentinel://user:p%40ss@[::1]:5/m",
            SeveralServers("sentinel", (("::1", 5),), True, "user", "p@ss", "m"),
        ),
        (
            "redis+cluster://:secret@a,b:7001",
            SeveralServers("cluster", (("a", 6379), ("b", 7001)), False, None, "secret"),
        ),
    ],
)
def test_urls_name_their_servers(url: str, expected: SeveralServers | None) -> None:
    assert parse_several(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://a:1",
        "redis+sentinel://a:1/m/x",
        "redis+sentinel:///m",
        "redis+cluster://a/3",
        "redis+cluster://a:x",
    ],
)
def test_urls_that_cannot_be_meant_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_several(url)
