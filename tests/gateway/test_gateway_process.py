"""The gateway as a process: its start, its signals, its end."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from mesh.v1 import inference_pb2, inference_pb2_grpc
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, eventually, parse_events, text_of

CHAT = "/v1/chat/completions"
HELLO = "Hello, world!"


@dataclass
class Process:
    process: asyncio.subprocess.Process
    url: str
    grpc_address: str
    lines: list[dict[str, Any]]

    async def wait(self) -> int:
        async with asyncio.timeout(20):
            return await self.process.wait()


@asynccontextmanager
async def start(mesh: FakeMesh, **settings: str) -> AsyncIterator[Process]:
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("PDMESH", "OTEL"))
    }
    env |= {
        "PDMESH_PORT": "0",
        "PDMESH_TOKENIZER_ADDRESSES": mesh.tokenizer_address,
        "PDMESH_SCHEDULER_ADDRESSES": mesh.scheduler_address,
        **settings,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", env=env, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    lines: list[dict[str, Any]] = []
    addresses: dict[str, str] = {}
    try:
        async with asyncio.timeout(30):
            while len(addresses) < 2:
                line = json.loads(await process.stdout.readline())
                lines.append(line)
                if line["message"].startswith("serving"):
                    addresses[line["message"]] = line["address"]
        reading = asyncio.create_task(_collect(process.stdout, lines))
        yield Process(process, f"http://{addresses['serving REST']}", addresses["serving"], lines)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    await reading


async def _collect(stdout: asyncio.StreamReader, lines: list[dict[str, Any]]) -> None:
    async for line in stdout:
        lines.append(json.loads(line))


async def read_stream(http: httpx.AsyncClient, started: asyncio.Event) -> str:
    text = ""
    async with http.stream("POST", CHAT, json=chat(stream=True)) as response:
        async for part in response.aiter_text():
            text += part
            started.set()
    return text


async def test_both_doors_serve_and_every_line_of_the_log_is_json(mesh: FakeMesh) -> None:
    async with (
        start(mesh) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
        grpc.aio.insecure_channel(gateway.grpc_address) as channel,
    ):
        rest = await http.post(CHAT, json=chat())
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        internal = [one async for one in stub.Generate(inference_pb2.GenerateRequest(text="hi"))]
        gateway.process.send_signal(signal.SIGTERM)
        assert await gateway.wait() == 0

    assert rest.json()["choices"][0]["message"]["content"] == HELLO
    assert "".join(one.delta.text for one in internal) == HELLO
    finished = [line for line in gateway.lines if line["message"] == "request finished"]
    assert len(finished) == 2
    assert {line["service"] for line in gateway.lines} == {"gateway"}


async def test_signal_lets_running_streams_finish_and_refuses_new_ones(mesh: FakeMesh) -> None:
    # ST-09
    mesh.decode.steps = asyncio.Semaphore(2)
    async with start(mesh) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
        started = asyncio.Event()
        reading = asyncio.create_task(read_stream(http, started))
        await started.wait()

        gateway.process.send_signal(signal.SIGTERM)
        host, port = gateway.url.removeprefix("http://").split(":")
        await eventually(lambda: _is_refused(host, int(port)))
        for _ in HELLO:
            mesh.decode.steps.release()
        text = await reading
        status = await gateway.wait()

    assert text_of(parse_events(text)) == HELLO
    assert text.endswith("data: [DONE]\n\n")
    assert "error" not in text
    assert status == 0


async def test_streams_that_do_not_finish_in_time_end_with_an_error(mesh: FakeMesh) -> None:
    # ST-09: one is active, one waits for a place.
    mesh.decode.steps = asyncio.Semaphore(2)
    async with (
        # Longer than uvicorn gives to what runs once it is told to end.
        start(mesh, PDMESH_DRAIN_TIMEOUT_S="2.5") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
    ):
        started = asyncio.Event()
        active = asyncio.create_task(read_stream(http, started))
        await started.wait()
        mesh.scheduler.gate = asyncio.Event()
        mesh.scheduler.was_asked.clear()
        queued = asyncio.create_task(http.post(CHAT, json=chat(stream=True)))
        await mesh.scheduler.was_asked.wait()

        gateway.process.send_signal(signal.SIGTERM)
        payloads = parse_events(await active)
        refused = await queued
        status = await gateway.wait()

    assert payloads[-1] == "[DONE]"
    assert payloads[-2]["error"]["type"] == "service_unavailable_error"
    assert refused.status_code == 503
    assert status == 0
    mesh.scheduler.gate.set()
    await mesh.quiet()


async def test_second_signal_ends_at_once(mesh: FakeMesh) -> None:
    mesh.decode.steps = asyncio.Semaphore(2)
    async with start(mesh) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
        started = asyncio.Event()
        reading = asyncio.create_task(read_stream(http, started))
        await started.wait()
        gateway.process.send_signal(signal.SIGTERM)
        await eventually(lambda: any(one["message"] == "draining" for one in gateway.lines))
        gateway.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            await gateway.wait()
        await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.parametrize("taken", ["PDMESH_PORT"])
async def test_taken_port_is_a_failure_at_the_start(mesh: FakeMesh, taken: str) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        env = {**os.environ, taken: str(sock.getsockname()[1])}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway",
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(30):
            log, errors = await process.communicate()

    assert process.returncode not in (0, None)
    assert b"cannot listen on 127.0.0.1" in errors
    # Not for a moment: `pdmesh up` would take whoever has the port for this gateway.
    assert b'"serving"' not in log


def _is_refused(host: str, port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((host, port)) != 0


async def test_sighup_reads_the_rules_again(mesh: FakeMesh, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules: [{default: {max_tokens: 3}}]")
    settings = {"PDMESH_RULES_PATH": str(rules), "PDMESH_RULES_CHECK_INTERVAL_S": "3600"}
    async with (
        start(mesh, **settings) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        before = await http.post(CHAT, json=chat())
        rules.write_text("rules: [{default: {max_tokens: 4}}]")
        gateway.process.send_signal(signal.SIGHUP)
        await eventually(lambda: any(one["message"] == "rules loaded" for one in gateway.lines))
        after = await http.post(CHAT, json=chat())

    answers = [one.json()["choices"][0]["message"]["content"] for one in (before, after)]
    assert answers == [HELLO[:3], HELLO[:4]]


async def test_invalid_rules_end_the_start_with_every_problem(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - dorp: a\n  - clamp: {n: {max: no}}\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway"),
        env=os.environ | {"PDMESH_RULES_PATH": str(rules)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )

    _, stderr = await process.communicate()

    assert process.returncode == 2
    lines = stderr.decode().splitlines()
    assert lines[0] == "gateway: the rules file is invalid"
    assert lines[1].startswith(f"{rules}:2: ")
    assert any(line.startswith(f"{rules}:3: ") for line in lines)
