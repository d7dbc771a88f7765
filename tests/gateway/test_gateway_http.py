"""Heads, ids and connections: HTTP below the API."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from mesh.telemetry import request_id_var
from tests.gateway.fake_tokenizer import EOS
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import RunningGateway, chat, run_gateway

CHAT = "/v1/chat/completions"


async def exchange(gateway: RunningGateway, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


async def test_request_id_is_the_clients_if_sane_and_in_every_answer(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    # ST-18
    for method, path in (("POST", CHAT), ("GET", "/nothing"), ("GET", CHAT), ("GET", "/live")):
        response = await http.request(
            method, path, json=chat() if method == "POST" else None, headers={"x-request-id": "a-1"}
        )
        assert response.headers["x-request-id"] == "a-1"
        assert (await http.request(method, path)).headers["x-request-id"]


@pytest.mark.parametrize("given", [b"x" * 10_000, b"a b", "é".encode(), b"", b"x" * 129])
async def test_insane_request_id_is_replaced(http: httpx.AsyncClient, given: bytes) -> None:
    # ST-18
    response = await http.post(CHAT, json=chat(), headers=[(b"x-request-id", given)])

    assert response.status_code == 200
    assert response.headers["x-request-id"].encode() != given
    assert len(response.headers["x-request-id"]) == 32


async def test_equal_request_ids_do_not_meet_in_the_mesh(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    # ST-18
    mesh.model.answers = {b"user: a\n": [*b"first", EOS], b"user: b\n": [*b"second", EOS]}
    headers = {"x-request-id": "same"}

    first, second = await asyncio.gather(
        http.post(CHAT, json=chat("a"), headers=headers),
        http.post(CHAT, json=chat("b"), headers=headers),
    )

    assert first.json()["choices"][0]["message"]["content"] == "first"
    assert second.json()["choices"][0]["message"]["content"] == "second"
    assert len({request.request_id for request in mesh.prefill.requests}) == 2


async def test_reused_request_id_is_not_aborted_with_its_predecessor(
    gateway: RunningGateway, mesh: FakeMesh
) -> None:
    # ST-18 (b)
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        for number in range(20):
            leaving = asyncio.create_task(
                http.post(CHAT, json=chat(), headers={"x-request-id": "X"})
            )
            await asyncio.sleep(0.0005 * number)
            leaving.cancel()
            response = await http.post(CHAT, json=chat(), headers={"x-request-id": "X"})
            assert response.json()["choices"][0]["message"]["content"] == "Hello, world!"
            await asyncio.gather(leaving, return_exceptions=True)
    await mesh.quiet()


async def test_request_id_travels_through_the_mesh_and_not_to_the_next_request(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    await http.post(CHAT, json=chat())
    await http.post(CHAT, json=chat())

    first, second = mesh.scheduler.metadata
    assert first["x-request-id"] in mesh.prefill.requests[0].request_id
    assert mesh.prefill.metadata[0]["x-request-id"] == first["x-request-id"]
    assert mesh.decode.metadata[0]["x-request-id"] == first["x-request-id"]
    assert first["x-request-id"] != second["x-request-id"]
    assert request_id_var.get() == ""


@pytest.mark.parametrize(
    "sent",
    [
        b"garbage\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_no_http_is_answered_in_openais_form(
    gateway: RunningGateway, sent: bytes
) -> None:
    answer = await exchange(gateway, sent)

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_offer_to_upgrade_is_ignored(gateway: RunningGateway) -> None:
    # Java's HttpClient offers h2c with every first request.
    body = json.dumps(chat()).encode()
    sent = (
        b"POST /v1/chat/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"Host: x\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
        b"Content-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(sent)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    writer.close()

    assert head.startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("size", [100_000, 2_000_000])
async def test_huge_head_is_refused(gateway: RunningGateway, size: int) -> None:
    sent = b"GET /live HTTP/1.1\r\nhost: x\r\nx-big: " + b"y" * size

    answer = await exchange(gateway, sent)

    assert answer.startswith(b"HTTP/1.1 431 ")
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert body["error"]["type"] == "invalid_request_error"


async def test_keep_alive_connection_serves_many_requests_and_a_large_body(
    gateway: RunningGateway,
) -> None:
    body = json.dumps(chat("a" * 500, user="u" * 200_000)).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        + f"content-length: {len(body)}\r\n".encode()
    )
    sent = request + b"\r\n" + body + request + b"connection: close\r\n\r\n" + body

    answer = await exchange(gateway, sent)

    assert answer.count(b"HTTP/1.1 200 OK") == 2


async def test_live_answers_whatever_the_mesh_does() -> None:
    async with FakeMesh() as mesh, run_gateway(mesh) as gateway:
        await mesh.kill("tokenizer")
        await mesh.kill("scheduler")
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            response = await http.get("/live")
    assert response.status_code == 200


async def test_unexpected_failure_is_a_500_without_details(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_gateway(mesh) as gateway, httpx.AsyncClient(base_url=gateway.url) as http:

        async def explode(*args: Any) -> None:
            raise RuntimeError("secret")

        monkeypatch.setattr(gateway.core.pipeline, "prepare", explode)
        generated = await http.post(CHAT, json=chat())
        monkeypatch.setattr(gateway.core.catalog, "get", explode)
        listed = await http.get("/v1/models/x")

    for response in (generated, listed):
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text
        assert response.headers["x-request-id"]
    assert sum(record.message == "unhandled error" for record in caplog.records) == 2
