"""Clients that are slow, many or from elsewhere, through real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from gateway import http_protocol
from mesh.errors import QueueFull
from tests.gateway.fakes import FakeMesh
from tests.gateway.keyed import add_key, bearer
from tests.gateway.running import RunningGateway, chat, eventually, run_gateway

CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = json.dumps(chat()).encode()
WHOLE = HEAD + f"content-length: {len(BODY)}\r\n\r\n".encode() + BODY


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hasty(shared_mesh: FakeMesh) -> AsyncIterator[RunningGateway]:
    """A gateway with little patience."""
    async with run_gateway(
        shared_mesh, header_timeout_s=0.3, body_timeout_s=0.3, max_header_bytes=4096
    ) as running:
        yield running


async def connect(gateway: RunningGateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", gateway.port)


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, dict[str, str], bytes]:
    """Status line, headers and body of one answer with a length."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    status, *lines = head.decode().strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return status.encode(), headers, body


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"GET /none HTTP/1.1\r\nhost: x\r\n\r\n", 404, "unknown_url"),
        (b"DELETE /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", 405, "method_not_allowed"),
        (b"OPTIONS /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", 405, "method_not_allowed"),
        (HEAD + b"content-length: 99999999\r\n\r\n", 413, "request_too_large"),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\n"
            b"content-length: 2\r\n\r\n{}",
            415,
            "unsupported_media_type",
        ),
        (b"GET /live HTTP/1.1\r\nhost: x\r\nx-big: " + b"y" * 5000, 431, None),
        (b"GET /live HTTP/1.1\r\nhost: x\r\nx-slow: ", 408, None),
        (HEAD + b"content-length: 100\r\n\r\n{", 408, "request_timeout"),
        (b"nonsense\r\n\r\n", 400, None),
    ],
)
async def test_every_refusal_is_openais_error_with_an_id(
    hasty: RunningGateway, sent: bytes, status: int, code: str | None
) -> None:
    reader, writer = await connect(hasty)
    writer.write(sent)

    status_line, headers, body = await read_answer(reader)
    writer.close()

    assert status_line.split()[1] == str(status).encode()
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)


async def test_slowloris_gets_its_time_and_no_more_and_holds_nobody_up(
    hasty: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that drip in keep no head alive; meanwhile others are served."""
    # Who still sends when the connection is cut may not see the answer.
    monkeypatch.setattr(http_protocol, "_LINGER_S", 60)
    drips = [await connect(hasty) for _ in range(40)]

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n")
        answer = asyncio.create_task(reader.readuntil(b"\r\n"))
        while not answer.done():
            writer.write(b"x-a: b\r\n")
            await asyncio.wait({answer}, timeout=0.05)
        writer.close()
        try:
            return answer.result()
        except ConnectionError:
            # A byte that came after the server had closed makes the kernel drop the answer, which
            # a busy client has not read by then.
            return b""

    async with asyncio.timeout(60), httpx.AsyncClient(base_url=hasty.url, timeout=50) as http:
        dripping = asyncio.gather(*(drip(*one) for one in drips))
        for _ in range(5):
            assert (await http.post(CHAT, json=chat())).status_code == 200
        answers = await dripping

    told = [answer for answer in answers if answer]
    assert told
    assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in told)


async def test_connection_without_a_byte_is_closed_without_a_word(hasty: RunningGateway) -> None:
    reader, writer = await connect(hasty)

    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def test_slow_second_head_is_refused_too(hasty: RunningGateway) -> None:
    reader, writer = await connect(hasty)
    writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
    first, _, _ = await read_answer(reader)
    writer.write(b"GET /live HT")

    second, _, _ = await read_answer(reader)
    writer.close()

    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 408 ")


async def test_early_bytes_of_the_next_head_do_not_end_an_answer_that_is_on_its_way(
    hasty: RunningGateway, mesh: FakeMesh
) -> None:
    mesh.scheduler.gate = asyncio.Event()
    reader, writer = await connect(hasty)
    writer.write(WHOLE + b"GET /live HT")
    await mesh.scheduler.was_asked.wait()
    writer.write(b"TP/1.1\r\n")
    # Longer than a head may take.
    await asyncio.sleep(0.5)
    mesh.scheduler.gate.set()

    first, _, _ = await read_answer(reader)
    writer.write(b"host: x\r\n\r\n")
    second, _, _ = await read_answer(reader)
    writer.close()

    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 200 ")


async def test_body_that_nobody_wants_does_not_keep_a_connection(hasty: RunningGateway) -> None:
    reader, writer = await connect(hasty)
    writer.write(b"POST /none HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
    status, _, _ = await read_answer(reader)
    assert status.startswith(b"HTTP/1.1 404 ")

    ended = asyncio.create_task(reader.read())
    async with asyncio.timeout(20):
        while not ended.done():
            writer.write(b"x")
            await asyncio.wait({ended}, timeout=0.05)
    writer.close()


async def test_body_that_comes_a_little_late_keeps_its_connection(hasty: RunningGateway) -> None:
    reader, writer = await connect(hasty)
    writer.write(b"POST /none HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n")
    await read_answer(reader)
    writer.write(b"12345GET /live HTTP/1.1\r\nhost: x\r\n\r\n")

    status, _, _ = await read_answer(reader)
    writer.close()

    assert status.startswith(b"HTTP/1.1 200 ")


async def test_too_many_connections_are_told_to_come_back(mesh: FakeMesh) -> None:
    async with run_gateway(mesh, max_connections=3) as gateway:
        held = [await connect(gateway) for _ in range(3)]
        for reader, writer in held:
            writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            await read_answer(reader)
        reader, writer = await connect(gateway)

        status, headers, body = await read_answer(reader)
        writer.close()
        assert status.startswith(b"HTTP/1.1 503 ")
        assert headers["retry-after"] == "1"
        assert json.loads(body)["error"]["type"] == "service_unavailable_error"

        held[0][1].close()

        async def is_served() -> bool:
            reader, writer = await connect(gateway)
            writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            status, _, _ = await read_answer(reader)
            writer.close()
            return b" 200 " in status

        async with asyncio.timeout(20):
            while not await is_served():
                pass
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_generations_beyond_the_bound_are_refused_at_once(
    mesh: FakeMesh, stream: bool
) -> None:
    # ST-15: the others go on, and their room is given back.
    mesh.scheduler.gate = asyncio.Event()
    async with (
        run_gateway(mesh, max_concurrent_requests=2) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=10) as http,
    ):
        running = [asyncio.create_task(http.post(CHAT, json=chat(stream=stream))) for _ in range(2)]
        await eventually(lambda: len(mesh.scheduler.admits) == 2)

        refused = await http.post(CHAT, json=chat(stream=stream))

        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"] == "1"
        mesh.scheduler.gate.set()
        assert [one.status_code for one in await asyncio.gather(*running)] == [200, 200]
        assert (await http.post(CHAT, json=chat(stream=stream))).status_code == 200


async def test_retry_after_is_never_too_short(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.scheduler.error = QueueFull("full", retry_after_s=1.2)

    response = await http.post(CHAT, json=chat())

    assert response.headers["retry-after"] == "2"


PREFLIGHT = {
    "origin": "https://app.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


async def test_other_sites_may_not_call_by_default(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    preflight = await http.options(CHAT, headers=PREFLIGHT)
    simple = await http.get("/v1/models", headers={"origin": "https://app.example"})

    assert preflight.status_code == 405
    for response in (preflight, simple):
        assert not any(name.startswith("access-control") for name in response.headers)


async def test_listed_origins_may_call_and_read_their_headers(
    mesh: FakeMesh, tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys_path = tmp_path_factory.mktemp("cors") / "keys.json"
    key = add_key(keys_path, "web")
    async with (
        run_gateway(mesh, cors_origins=["https://app.example"], keys_path=keys_path) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        allowed = await http.options(CHAT, headers=PREFLIGHT)
        foreign = await http.options(CHAT, headers=PREFLIGHT | {"origin": "https://evil.example"})
        served = await http.post(
            CHAT, json=chat(), headers={"origin": "https://app.example", **bearer(key)}
        )
        refused = await http.post(CHAT, json=chat(), headers={"origin": "https://app.example"})

    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
    assert allowed.headers["x-request-id"]
    assert "access-control-allow-credentials" not in allowed.headers
    assert "access-control-allow-origin" not in foreign.headers
    assert "x-ratelimit-remaining-tokens" in served.headers["access-control-expose-headers"]
    # A page can read why it was refused.
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
