"""API keys through HTTP: who gets in, who does not, and what a wrong key costs."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.gateway.fake_tokenizer import MODEL
from tests.gateway.fakes import FakeMesh
from tests.gateway.keyed import add_key, bearer, revoke, set_group
from tests.gateway.running import RunningGateway, chat, completion, eventually, run_gateway

CHAT = "/v1/chat/completions"
NEEDS_KEY = [
    ("POST", CHAT),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    # What does not exist is nobody's business either.
    ("GET", "/nothing"),
    ("PUT", CHAT),
    ("GET", "/live/"),
    ("GET", "//live"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keys_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def key(keys_path: Path) -> str:
    return add_key(keys_path, "ada", "research")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin_key(keys_path: Path) -> str:
    return add_key(keys_path, "root", is_admin=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    shared_mesh: FakeMesh, keys_path: Path, key: str, admin_key: str
) -> AsyncIterator[RunningGateway]:
    rules = keys_path.with_name("rules.yaml")
    rules.write_text(
        """
        rules:
          - {name: group, when: {key_group: research}, clamp: {max_tokens: {max: 5}}}
          - {name: key, when: {key: "roo*"}, default: {max_tokens: 7}}
        """
    )
    async with run_gateway(
        shared_mesh, keys_path=keys_path, keys_check_interval_s=0.02, rules_path=rules
    ) as running:
        yield running


@pytest.mark.parametrize(("method", "path"), NEEDS_KEY)
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "Bearer wrong",
        "Bearer pdm_aaaaaaaaaa_" + "b" * 43,
        "Basic YWRhOmFkYQ==",
        "Bearer",
        "Bearer " + "x" * 20_000,
    ],
)
async def test_without_a_right_key_nothing_but_probes_is_answered(
    http: httpx.AsyncClient, mesh: FakeMesh, method: str, path: str, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}

    response = await http.request(method, path, headers=headers)

    assert response.status_code == 401
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "invalid_api_key"
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    assert mesh.tokenizer.num_encodes == 0


@pytest.mark.parametrize("path", ["/live", "/health"])
async def test_probes_need_no_key(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(path)

    assert response.status_code in (200, 503)


async def test_right_secret_under_anothers_id_is_wrong(
    http: httpx.AsyncClient, key: str, admin_key: str
) -> None:
    mixed = "_".join([*key.split("_")[:2], admin_key.split("_")[2]])

    assert (await http.get("/v1/models", headers=bearer(mixed))).status_code == 401
    assert (await http.get("/v1/models", headers=bearer(key))).status_code == 200
    assert (await http.get("/v1/models", headers={"authorization": f"bearer {key}"})).is_success


async def test_two_keys_in_one_request_are_refused(http: httpx.AsyncClient, key: str) -> None:
    two = [("authorization", f"Bearer {key}"), ("authorization", "Bearer other")]

    assert (await http.get("/v1/models", headers=two)).status_code == 401


async def test_openai_client_raises_its_authentication_error(
    gateway: RunningGateway, key: str
) -> None:
    url = f"{gateway.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            await stranger.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}]
            )
    assert caught.value.code == "invalid_api_key"

    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as friend:
        answer = await friend.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
    assert answer.choices[0].message.content


async def test_refused_before_its_body_is_sent(gateway: RunningGateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 5000000\r\n\r\n"
    )

    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    await asyncio.wait_for(reader.read(), 20)
    writer.close()

    assert head.startswith(b"HTTP/1.1 401 ")


async def test_revoked_key_stops_working_and_a_new_one_starts(
    http: httpx.AsyncClient, keys_path: Path, key: str
) -> None:
    new = add_key(keys_path, "guest")

    async def status(which: str) -> int:
        return (await http.get("/v1/models", headers=bearer(which))).status_code

    async with asyncio.timeout(20):
        while await status(new) != 200:
            pass
        revoke(keys_path, "guest")
        while await status(new) != 401:
            pass
    assert await status(key) == 200


async def test_expired_key_is_refused_as_such_and_one_that_will_expire_works(
    http: httpx.AsyncClient, gateway: RunningGateway, keys_path: Path
) -> None:
    old = add_key(keys_path, "lapsed", lifetime=timedelta(seconds=-1))
    new = add_key(keys_path, "lapsed", lifetime=timedelta(days=1))
    await eventually(lambda: gateway.core.keys.find(new))

    refused = await http.get("/v1/models", headers=bearer(old))

    assert refused.status_code == 401
    assert refused.json()["error"]["message"] == "Your API key has expired."
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert (await http.get("/v1/models", headers=bearer(new))).status_code == 200


async def test_first_key_closes_a_running_gateway_and_losing_the_file_opens_nothing(
    mesh: FakeMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    async with (
        run_gateway(mesh, keys_path=path, keys_check_interval_s=0.02) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        assert (await http.get("/v1/models")).status_code == 200

        key = add_key(path, "first")
        await eventually(lambda: gateway.core.keys.is_required)
        await eventually(lambda: gateway.core.keys.find(key))
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/v1/models", headers=bearer(key))).status_code == 200

        caplog.clear()
        path.unlink()
        await eventually(lambda: any("are gone" in one.message for one in caplog.records))
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/v1/models", headers=bearer(key))).status_code == 200

        caplog.clear()
        path.write_text("{}x")
        await eventually(lambda: any("cannot be read" in one.message for one in caplog.records))
        assert (await http.get("/v1/models", headers=bearer(key))).status_code == 200


async def test_admin_key_is_needed_for_what_concerns_the_whole_mesh(
    http: httpx.AsyncClient, key: str, admin_key: str
) -> None:
    for path in ("/metrics", "/dashboard", "/dashboard/api/live", "/dashboard/api/requests"):
        assert (await http.get(path)).status_code == 401
        assert (await http.get(path, headers=bearer("wrong"))).status_code == 401
        assert (await http.get(path, headers=bearer(key))).status_code in (401, 403)
        assert (await http.get(path, headers=bearer(admin_key))).status_code == 200

    opened = await http.get(f"/dashboard?key={admin_key}")
    assert opened.status_code == 307
    assert opened.cookies["pdmesh_dashboard"] == admin_key
    # The client sends it from now on.
    assert (await http.get("/dashboard")).status_code == 200
    http.cookies.clear()


async def test_rules_see_the_key_and_its_group(
    http: httpx.AsyncClient, mesh: FakeMesh, key: str, admin_key: str
) -> None:
    clamped = await http.post(CHAT, json=chat(max_tokens=9), headers=bearer(key))
    filled = await http.post(CHAT, json=chat(), headers=bearer(admin_key))

    assert clamped.headers["x-pdmesh-param-actions"] == "clamp:max_tokens"
    assert filled.headers["x-pdmesh-param-actions"] == "default:max_tokens"
    assert [one.sampling_params.max_tokens for one in mesh.prefill.requests] == [5, 7]


async def test_scheduler_hears_the_group_as_tenant(
    http: httpx.AsyncClient, mesh: FakeMesh, key: str
) -> None:
    await http.post(CHAT, json=chat(), headers=bearer(key))

    assert [admit.tenant for admit in mesh.scheduler.admits] == ["research"]


async def test_group_uses_its_models_only_and_learns_nothing_of_others(
    http: httpx.AsyncClient, keys_path: Path, mesh: FakeMesh
) -> None:
    set_group(keys_path, "narrow", models=("other-*",))
    narrow = bearer(add_key(keys_path, "narrow", "narrow"))
    async with asyncio.timeout(20):
        while (await http.get("/v1/models", headers=narrow)).status_code != 200:
            pass

    assert (await http.get("/v1/models", headers=narrow)).json()["data"] == []
    for response in (
        await http.post(CHAT, json=chat(), headers=narrow),
        await http.post(CHAT, json=chat() | {"model": "none"}, headers=narrow),
        await http.get(f"/v1/models/{MODEL}", headers=narrow),
        await http.post("/tokenize", json={"model": MODEL, "prompt": "a"}, headers=narrow),
        await http.post("/tokenize", json={"prompt": "a"}, headers=narrow),
    ):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
    assert not mesh.scheduler.admits


async def test_key_and_actions_are_in_the_log_line_and_on_the_root_span(
    http: httpx.AsyncClient,
    key: str,
    spans: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        await http.post(CHAT, json=chat(max_tokens=9), headers=bearer(key))

    [line] = [one.__dict__ for one in caplog.records if one.message == "request finished"]
    assert (line["key"], line["key_group"]) == ("ada", "research")
    assert line["param_actions"] == "clamp:max_tokens"
    [root] = [one for one in spans.get_finished_spans() if one.name == "gateway.request"]
    assert root.attributes is not None
    assert root.attributes["pdmesh.key"] == "ada"
    assert root.attributes["pdmesh.key_group"] == "research"
    assert root.attributes["pdmesh.param_actions"] == "clamp:max_tokens"


async def test_ten_thousand_wrong_keys_do_not_slow_right_ones(
    gateway: RunningGateway, http: httpx.AsyncClient, key: str
) -> None:
    # Well-formed, so that each costs all that a wrong key can cost; on a few busy connections.
    num_connections, num_each = 10, 1000

    async def guess(number: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        num_refused = 0
        for batch in range(0, num_each, 50):
            for index in range(batch, batch + 50):
                guessed = f"pdm_{number:04}{index:06}_{'x' * 43}"
                writer.write(
                    b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
                    + guessed.encode()
                    + b"\r\n\r\n"
                )
            for _ in range(50):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                num_refused += head.startswith(b"HTTP/1.1 401 ")
        writer.close()
        return num_refused

    async def timed() -> float:
        started = time.perf_counter()
        response = await http.get("/v1/models", headers=bearer(key))
        assert response.status_code == 200
        return time.perf_counter() - started

    before = sorted([await timed() for _ in range(50)])[25]
    guessing = asyncio.gather(*(guess(number) for number in range(num_connections)))
    during = []
    while not guessing.done():
        during.append(await timed())
    after = sorted([await timed() for _ in range(50)])[25]

    assert sum(await guessing) == num_connections * num_each
    # While they come they cost what any request costs (guesser and gateway share one thread
    # here); no queue grows, and nothing is left of them afterwards.
    assert sorted(during)[len(during) // 2] < 0.5
    assert after < 5 * before + 0.01


async def test_wrong_key_costs_the_same_however_long_it_is(
    gateway: RunningGateway, key: str
) -> None:
    ring = gateway.core.keys
    started = time.process_time()
    for index in range(10_000):
        assert ring.find(f"pdm_{index:010}_{'x' * 43}") is None
    assert ring.find(key) is not None
    # A hash and a comparison each: some microseconds.
    assert time.process_time() - started < 1.0


async def test_secrets_and_texts_are_in_no_answer_of_the_admin_routes(
    http: httpx.AsyncClient, key: str, admin_key: str
) -> None:
    await http.post("/v1/completions", json=completion("my secret prompt"), headers=bearer(key))

    for path in ("/metrics", "/dashboard/api/live", "/dashboard/api/requests"):
        text = (await http.get(path, headers=bearer(admin_key))).text
        assert key not in text
        assert admin_key not in text
        assert "my secret prompt" not in text
