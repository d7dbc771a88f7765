"""Bodies that are no JSON object, no JSON at all, too deep or too large."""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import http_protocol
from gateway.body import MAX_DEPTH, parse_object
from gateway.openai.chat import ChatRequest
from gateway.openai.completions import CompletionRequest
from mesh.errors import InvalidRequest, MeshError
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, completion, run_gateway
from tests.rules.bodies import MALFORMED

PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
JSON_HEADERS = {"content-type": "application/json"}


def nested(depth: int) -> bytes:
    body = json.dumps(chat(metadata="X")).encode()
    return body.replace(b'"X"', b"[" * depth + b"]" * depth)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"[]", b"[1]", b'"hi"', b"7", b"true", b"null", b""])
async def test_body_that_is_no_object_is_refused(
    http: httpx.AsyncClient, path: str, body: bytes
) -> None:
    # GW-08
    response = await http.post(path, content=body, headers=JSON_HEADERS)

    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("body", MALFORMED)
def test_body_that_two_parsers_could_read_in_two_ways_is_refused(body: bytes) -> None:
    # GW-10
    with pytest.raises(InvalidRequest):
        parse_object(body)


@pytest.mark.parametrize("body", MALFORMED)
async def test_malformed_body_is_answered_in_openais_form(
    http: httpx.AsyncClient, body: bytes
) -> None:
    # GW-10
    response = await http.post(PATHS[0], content=body, headers=JSON_HEADERS)

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_escaped_surrogate_pair_is_a_character() -> None:
    assert parse_object(b'{"a":"\\ud83d\\ude00"}') == {"a": "😀"}


@pytest.mark.parametrize("depth", [MAX_DEPTH, 900, 1000, 5000, 20_000])
async def test_deep_nesting_is_refused_and_the_next_request_served(
    http: httpx.AsyncClient, depth: int
) -> None:
    # GW-11
    response, other = await asyncio.gather(
        http.post(PATHS[0], content=nested(depth), headers=JSON_HEADERS),
        http.post(PATHS[0], json=chat()),
    )

    assert response.status_code == 400
    assert "deep" in response.json()["error"]["message"]
    assert other.status_code == 200


def test_nesting_up_to_the_limit_is_allowed() -> None:
    parse_object(nested(MAX_DEPTH - 1))
    with pytest.raises(InvalidRequest):
        parse_object(nested(MAX_DEPTH))


def test_depth_is_found_in_the_time_that_reading_takes() -> None:
    # ST-17
    body = b'{"x":[%b]}' % b",".join([b"[" * 98 + b"]" * 98] * 500)

    def cpu_s(read: Callable[[bytes], object]) -> float:
        started_s = time.process_time()
        read(body)
        return time.process_time() - started_s

    # The least of some, which the garbage of other tests has not slowed down.
    reading_s = min(cpu_s(json.loads) for _ in range(5))
    assert min(cpu_s(parse_object) for _ in range(5)) < 8 * reading_s


def test_brackets_in_strings_and_siblings_do_not_nest() -> None:
    parse_object(json.dumps({"a": "[" * 500, "b": [[]] * 500, "c": '\\"[' * 200}).encode())


@pytest.mark.parametrize("where", ["response_format", "tools"])
async def test_deep_schema_is_refused(http: httpx.AsyncClient, where: str) -> None:
    # GW-11
    deep = "[" * 3000 + "]" * 3000
    body = json.dumps(chat() | {where: {"schema": "X"}}).replace('"X"', deep)

    response = await http.post(PATHS[0], content=body, headers=JSON_HEADERS)

    assert response.status_code == 400
    assert "deep" in response.json()["error"]["message"]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=5))
def test_every_json_object_is_read_as_json_reads_it(value: dict[str, object]) -> None:
    try:
        body = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (UnicodeEncodeError, ValueError):
        return
    assert parse_object(body) == value


@given(st.binary(max_size=200))
def test_bytes_are_read_or_refused_never_worse(body: bytes) -> None:
    with suppress(InvalidRequest):
        parse_object(body)


KEYS = [*ChatRequest.model_fields, *CompletionRequest.model_fields, "tool_choice", "best_of"]


@given(st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, max_size=6))
def test_any_values_of_known_parameters_are_parsed_or_refused(value: dict[str, object]) -> None:
    base = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    for parse in (ChatRequest.parse, CompletionRequest.parse):
        try:
            parse({**base, **value})
        except MeshError as error:
            assert error.param is not None  # noqa: PT017


async def test_body_at_the_limit_is_accepted_and_one_byte_more_refused(mesh: FakeMesh) -> None:
    # GW-13
    body = json.dumps(chat(user="")).encode()
    limit = 4096
    full = body.replace(b'"user": ""', b'"user": "' + b"u" * (limit - len(body)) + b'"')
    assert len(full) == limit
    async with run_gateway(mesh, max_body_bytes=limit) as gateway, httpx.AsyncClient() as http:
        url = gateway.url + PATHS[0]

        exact = await http.post(url, content=full, headers=JSON_HEADERS)
        above = await http.post(url, content=full + b" ", headers=JSON_HEADERS)

    assert exact.status_code == 200
    assert above.status_code == 413
    assert above.json()["error"]["code"] == "request_too_large"


async def test_large_body_is_refused_announced_or_chunked(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GW-13: who still sends when the connection is cut may not see the answer.
    monkeypatch.setattr(http_protocol, "_LINGER_S", 60)

    async def endless() -> object:
        for _ in range(64):
            yield b" " * (1024 * 1024)

    announced = await http.post(PATHS[0], content=b" " * (64 << 20), headers=JSON_HEADERS)
    chunked = await http.post(PATHS[0], content=endless(), headers=JSON_HEADERS)  # type: ignore[arg-type]

    assert announced.status_code == chunked.status_code == 413
    assert announced.json()["error"]["type"] == "invalid_request_error"
    assert (await http.post(PATHS[0], json=chat())).status_code == 200


async def test_announced_size_is_refused_before_a_byte_of_the_body_is_sent(
    mesh: FakeMesh,
) -> None:
    # GW-13
    async with run_gateway(mesh) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
            b"content-type: application/json\r\ncontent-length: 67108864\r\n\r\n"
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 20)
        writer.close()

    assert b" 413 " in head
    assert mesh.tokenizer.num_encodes == 0


async def test_bytes_behind_the_announced_body_do_not_reach_it(mesh: FakeMesh) -> None:
    # GW-13
    async with run_gateway(mesh) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
            b"content-type: application/json\r\ncontent-length: 10\r\n\r\n" + b"{" * (1 << 20)
        )
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()

    statuses = [line for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1")]
    assert statuses
    assert all(b" 400 " in status for status in statuses)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
    ],
)
async def test_media_types(http: httpx.AsyncClient, headers: dict[str, str], status: int) -> None:
    response = await http.post(PATHS[0], content=json.dumps(chat()), headers=headers)

    assert response.status_code == status
    if status == 415:
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_body_without_media_type_is_read_as_json(mesh: FakeMesh) -> None:
    body = json.dumps(completion()).encode()
    async with run_gateway(mesh) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            + f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()

    assert answer.startswith(b"HTTP/1.1 200")
