"""nginx with the shipped configuration: bodies, streams, retries, errors."""

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gateway.rules.loader import parse
from gateway.rules.lua import compile_to_lua
from tests.rules.bodies import MALFORMED
from tests.rules.nginx import Nginx, run_nginx
from tests.rules.wire import Answer, Background, Client, Received, response, send_once, upstream

RULES = parse(
    """
    rules:
      - rewrite_model: {alias: smol}
        default: {max_tokens: 64, temperature: 0.7}
    """
)
_MIB = 1024 * 1024


@pytest.fixture(scope="module")
def echoing(background: Background, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with (
        upstream(background) as port,
        run_nginx(tmp_path_factory.mktemp("nginx"), RULES, [port]) as nginx,
    ):
        yield nginx
        assert "lua" not in nginx.log(), nginx.log()


@pytest.fixture
def client(echoing: Nginx) -> Iterator[Client]:
    made = Client(echoing.port)
    yield made
    made.close()


def _body_of(num_bytes: int) -> bytes:
    start, end = b'{"model":"alias","prompt":"', b'"}'
    return start + b"x" * (num_bytes - len(start) - len(end)) + end


def _edited(body: bytes) -> bytes:
    """What the rules make of it."""
    return body.replace(b'"alias"', b'"smol"')[:-1] + b',"max_tokens":64,"temperature":0.7}'


def _assert_openai_error(answer: Answer, status: int) -> None:
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "<" not in error["message"]


# NG-04
@pytest.mark.parametrize("chunk_bytes", [None, 64 * 1024])
@pytest.mark.parametrize(
    "num_bytes", [100, 128 * 1024 - 1, 128 * 1024, 128 * 1024 + 1, _MIB, 9 * _MIB]
)
def test_rules_apply_to_bodies_in_memory_and_in_files(
    client: Client, num_bytes: int, chunk_bytes: int | None
) -> None:
    body = _body_of(num_bytes)

    received = client.send(body, chunk_bytes=chunk_bytes).received()

    assert received.body == _edited(body)
    assert received.header("content-length") == [str(len(_edited(body)))]


# NG-04, GW-13
@pytest.mark.parametrize("chunk_bytes", [None, 64 * 1024])
def test_body_beyond_the_limit_is_refused_as_json(echoing: Nginx, chunk_bytes: int | None) -> None:
    client = Client(echoing.port)
    assert client.send(_body_of(10 * _MIB), chunk_bytes=chunk_bytes).status == 200

    try:
        answer = client.send(_body_of(10 * _MIB + 1), chunk_bytes=chunk_bytes)
    except ConnectionError:
        # nginx answered and closed while we still sent: the answer is in the socket.
        answer = client.answer()

    _assert_openai_error(answer, 413)
    assert answer.json()["error"]["code"] == "request_too_large"
    client.close()


# NG-04
@pytest.mark.parametrize("chunk_bytes", [None, 64 * 1024])
def test_rules_apply_where_nginx_would_pass_bodies_on_as_they_come(
    background: Background, tmp_path: Path, chunk_bytes: int | None
) -> None:
    unbuffered = {"proxy_request_buffering on;": "proxy_request_buffering off;"}
    with (
        upstream(background) as port,
        run_nginx(tmp_path, RULES, [port], unbuffered) as nginx,
        closing(Client(nginx.port)) as client,
    ):
        for num_bytes in (100, 128 * 1024, 128 * 1024 + 1, _MIB):
            received = client.send(_body_of(num_bytes), chunk_bytes=chunk_bytes).received()

            assert received.body == _edited(_body_of(num_bytes))


# NG-01
def test_empty_arrays_and_objects_stay_what_they_are(client: Client) -> None:
    body = b'{"model":"smol","messages":[{"role":"user","content":[]}],"stop":[],"tools":[],'
    body += b'"logit_bias":{},"metadata":{},"x":{"y":[[],{}]},"max_tokens":8,"temperature":0}'

    assert client.send(body).received().body == body


# NG-02
@pytest.mark.parametrize(
    "digits",
    ["1000000000000000", "1234567890123456", "9007199254740993", "9223372036854775807", "8.0"],
)
def test_digits_of_numbers_arrive_unchanged(client: Client, digits: str) -> None:
    body = f'{{"seed":{digits},"prompt":[{digits}],"max_tokens":8,"temperature":0}}'.encode()

    assert client.send(body).received().body == body


# GW-10
@pytest.mark.parametrize("body", MALFORMED)
def test_malformed_body_is_refused_as_json(client: Client, body: bytes) -> None:
    _assert_openai_error(client.send(body), 400)


# NG-03, GW-03
def test_explicit_null_is_left_alone(client: Client) -> None:
    for messages in (b"null", b'[{"content":null}]'):
        body = b'{"temperature":null,"max_tokens":null,"stream":null,"messages":' + messages + b"}"

        answer = client.send(body)

        assert answer.received().body == body
        assert "x-pdmesh-param-actions" not in answer.headers


# NG-03
def test_null_in_an_answer_is_left_alone(background: Background, tmp_path: Path) -> None:
    told = b'{"choices":[],"usage":null}'
    with (
        upstream(background, _Scripted(response(200, told))) as port,
        run_nginx(tmp_path, RULES, [port]) as nginx,
    ):
        answer = send_once(nginx.port)

    assert (answer.status, answer.body) == (200, told)


# GW-11
@pytest.mark.parametrize("depth", [101, 900, 5000, 20000])
def test_deep_nesting_is_refused_and_the_next_request_served(client: Client, depth: int) -> None:
    nested = b'{"metadata":' + b"[" * depth + b"]" * depth + b"}"

    _assert_openai_error(client.send(nested), 400)
    assert client.send(_body_of(100)).status == 200


def test_actions_are_told_to_the_client(client: Client) -> None:
    answer = client.send(b'{"model":"alias"}')

    assert answer.headers["x-pdmesh-param-actions"] == (
        "rewrite_model:smol, default:max_tokens, default:temperature"
    )


def test_request_without_a_body_passes(client: Client) -> None:
    received = client.send(None, method="GET", path="/v1/models", headers=()).received()

    assert (received.method, received.path, received.body) == ("GET", "/v1/models", b"")


def test_client_keeps_its_request_id(client: Client) -> None:
    answer = client.send(_body_of(100), headers=[("X-Request-Id", "mine-1")])

    assert answer.received().header("x-request-id") == ["mine-1"]
    assert answer.headers["x-request-id"] == "mine-1"


def test_the_clients_trace_passes_and_what_is_not_one_is_left_to_the_gateway(
    client: Client,
) -> None:
    # OB-04
    valid = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    for given in ([valid], [valid.upper()], ["garbage"], [valid, valid]):
        headers = [("Traceparent", one) for one in given] + [("tracestate", "vendor=1")]
        received = client.send(_body_of(100), headers=headers).received()

        assert received.header("traceparent") == given
        assert received.header("tracestate") == ["vendor=1"]


def test_compressed_body_is_refused(client: Client) -> None:
    headers = [("content-type", "application/json"), ("content-encoding", "gzip")]

    _assert_openai_error(client.send(b"\x1f\x8b", headers=headers), 415)


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        ("GET /%zz HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (f"GET / HTTP/1.1\r\nHost: a\r\nX-Long: {'a' * 40_000}\r\n\r\n", 431),
        (f"GET /{'a' * 40_000} HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        ("BREW\x01 / HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_what_is_not_http_gets_an_openai_error(
    echoing: Nginx, request_text: str, status: int
) -> None:
    with socket.create_connection(("127.0.0.1", echoing.port), timeout=10) as connection:
        connection.sendall(request_text.encode("latin-1"))
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        payload = answer.read()

    headers = {name.lower(): value for name, value in answer.getheaders()}
    _assert_openai_error(Answer(answer.status, headers, payload), status)


async def _stream(received: Received, writer: asyncio.StreamWriter) -> None:
    """Five events, the time of sending in each."""
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"x-accel-redirect: /_pdmesh/error\r\nset-cookie: a=b\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    for _ in range(5):
        event = f"data: {time.monotonic()}\n\n".encode()
        writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0.2)
    writer.write(b"0\r\n\r\n")


def _stream_delays(port: int, headers: dict[str, str]) -> tuple[list[float], dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/v1/chat/completions", b'{"stream":true}', headers)
    answer = connection.getresponse()
    delays = []
    while line := answer.readline():
        if line.startswith(b"data: "):
            delays.append(time.monotonic() - float(line[6:]))
    connection.close()
    return delays, {name.lower(): value for name, value in answer.getheaders()}


# NG-06, NG-07
def test_tokens_pass_two_nginx_as_they_come(background: Background, tmp_path: Path) -> None:
    with (
        upstream(background, _stream) as port,
        run_nginx(tmp_path / "inner", RULES, [port]) as inner,
        run_nginx(tmp_path / "outer", RULES, [inner.port]) as outer,
    ):
        delays, headers = _stream_delays(outer.port, {"Accept-Encoding": "gzip, br"})

    assert len(delays) == 5
    # Held back until the end they would be late by 0.2 to 1 s; half of them may be, on a busy
    # machine.
    assert sorted(delays)[2] < 0.1
    assert headers["x-accel-buffering"] == "no"
    assert "no-cache" in headers["cache-control"]
    assert "content-encoding" not in headers
    assert "set-cookie" not in headers
    assert headers["x-pdmesh-param-actions"].startswith("default:max_tokens")


# NG-07
def test_plain_json_may_be_compressed(client: Client) -> None:
    answer = client.send(_body_of(4000), headers=[("Accept-Encoding", "gzip")])

    assert answer.headers["content-encoding"] == "gzip"


class _Scripted:
    """An upstream that counts requests and answers as told."""

    def __init__(self, reply: bytes | None) -> None:
        self._reply = reply
        self.num_requests = 0

    async def __call__(self, received: Received, writer: asyncio.StreamWriter) -> None:
        self.num_requests += 1
        if self._reply is None:
            writer.transport.abort()
            return
        writer.write(self._reply)


# NG-09
def test_post_is_not_repeated_after_it_was_sent(background: Background, tmp_path: Path) -> None:
    resetting = _Scripted(None)
    healthy = _Scripted(response(200, b'{"ok":true}'))
    with (
        upstream(background, resetting) as first,
        upstream(background, healthy) as second,
        run_nginx(tmp_path, RULES, [first, second]) as nginx,
    ):
        # nginx begins with either of them.
        answers = [send_once(nginx.port) for _ in range(2)]

    assert sorted(answer.status for answer in answers) == [200, 502]
    _assert_openai_error(next(one for one in answers if one.status == 502), 502)
    assert (resetting.num_requests, healthy.num_requests) == (1, 1)


# NG-09
def test_error_of_the_upstream_passes_unchanged(background: Background, tmp_path: Path) -> None:
    told = b'{"error":{"message":"boom","type":"server_error","param":null,"code":null}}'
    failing = _Scripted(response(500, told))
    with (
        upstream(background, failing) as port,
        run_nginx(tmp_path, RULES, [port, port]) as nginx,
    ):
        answer = send_once(nginx.port)

    assert (answer.status, answer.body, failing.num_requests) == (500, told, 1)


# NG-09
def test_refused_connection_is_tried_at_the_next_upstream(
    background: Background, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        refusing = probe.getsockname()[1]
    healthy = _Scripted(response(200, b'{"ok":true}'))
    with (
        upstream(background, healthy) as port,
        run_nginx(tmp_path, RULES, [refusing, port]) as nginx,
    ):
        answers = [send_once(nginx.port) for _ in range(2)]

    assert [answer.status for answer in answers] == [200, 200]
    assert healthy.num_requests == 2


def test_no_upstream_at_all_is_an_openai_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        refusing = probe.getsockname()[1]
    with run_nginx(tmp_path, RULES, [refusing]) as nginx:
        _assert_openai_error(send_once(nginx.port), 502)


# GW-26
@pytest.mark.parametrize(
    ("status", "payload"),
    [(502, b"<h1>Bad</h1>"), (200, b"<h1>Bad</h1>"), (200, b""), (502, b"<h1>" + b"x" * 500)],
)
def test_page_of_the_upstream_becomes_an_openai_error(
    background: Background, tmp_path: Path, status: int, payload: bytes
) -> None:
    with (
        upstream(background, _Scripted(response(status, payload, "text/html"))) as port,
        run_nginx(tmp_path, RULES, [port]) as nginx,
    ):
        answer = send_once(nginx.port)
        log = nginx.log()

    _assert_openai_error(answer, 502)
    logged = payload[:200].decode()
    assert f"status {status} and no JSON: {logged}" in log
    assert "x" * 200 not in log


def test_reload_with_invalid_rules_keeps_the_old_ones(
    background: Background, tmp_path: Path
) -> None:
    with upstream(background) as port, run_nginx(tmp_path, RULES, [port]) as nginx:
        nginx.reload("return {format = 99}")
        _wait_for(lambda: "compiled by another version" in nginx.log())
        kept = send_once(nginx.port).received().body

        nginx.reload(compile_to_lua(parse("rules: [{force: {n: 1}}]"), "new"))
        _wait_for(lambda: send_once(nginx.port).received().body == b'{"n":1}')

    assert json.loads(kept) == {"max_tokens": 64, "temperature": 0.7}


def _wait_for(is_done: object) -> None:
    assert callable(is_done)
    deadline = time.monotonic() + 10
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.02)
