"""`pdmesh trace`, `top` and `doctor` against a running gateway."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner, Result

from mesh.cli import doctor, top, trace
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import RunningGateway, chat, run_gateway

app = typer.Typer()
app.command("trace")(trace.trace)
app.command("top")(top.top)
app.command("doctor")(doctor.doctor)


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with FakeMesh() as mesh, run_gateway(mesh, dashboard_key="k") as running:
        async with httpx.AsyncClient(base_url=running.url) as client:
            headers = {"x-request-id": "mine"}
            await client.post("/v1/chat/completions", json=chat(), headers=headers)
        yield running


async def invoke(home: Path, *arguments: str) -> Result:
    runner, command = CliRunner(), [*arguments, "--home", str(home)]
    return await asyncio.to_thread(lambda: runner.invoke(app, command))


async def test_trace_gives_the_stages_of_a_request_as_json(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    options = ("--url", gateway.url, "--key", "k")
    result = await invoke(tmp_path, "trace", "mine", "--json", *options)

    assert result.exit_code == 0, result.output
    traced = json.loads(result.stdout)
    assert {"rules", "tokenize", "queue"} <= {stage["name"] for stage in traced["stages"]}
    total_ms = sum(stage["ms"] for stage in traced["stages"])
    assert total_ms == pytest.approx(traced["total_ms"], abs=0.01)


async def test_trace_top_and_doctor_draw_for_people(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    options = ("--url", gateway.url, "--key", "k")
    drawn = await invoke(tmp_path, "trace", "mine", *options)
    screen = await invoke(tmp_path, "top", "--once", *options)
    doctored = await invoke(tmp_path, "doctor", "--now", *options)

    assert "prefill compute" in drawn.stdout
    assert "█" in drawn.stdout
    assert "TTFT" in screen.stdout
    assert "decode-0" in screen.stdout
    assert doctored.exit_code == 0


async def test_commands_say_what_is_wrong_in_a_sentence(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    options = ("--url", gateway.url)
    unknown = await invoke(tmp_path, "trace", "other", "--key", "k", *options)
    refused = await invoke(tmp_path, "top", "--once", *options)
    nothing = await invoke(tmp_path, "trace", "mine")
    vague = await invoke(tmp_path, "doctor", *options)
    odd = await invoke(tmp_path, "doctor", "--now", "--url", "here")

    assert "not among those" in unknown.stderr
    assert "needs its key" in refused.stderr
    assert "nothing runs here" in nothing.stderr
    assert vague.exit_code == 2
    assert odd.exit_code == 2
    assert "--url" in odd.stderr
    assert all(one.exit_code for one in (unknown, refused, nothing))


async def test_what_the_gateway_has_forgotten_is_found_in_its_log(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    line: dict[str, Any] = {
        "request_id": "0123",
        "client_request_id": "old",
        "status": 200,
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "ttft_ms": 7.0,
        "total_ms": 10.0,
        "stages_ms": {"queue": 4.0, "decode_steps": 6.0},
    }
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gateway-0.log").write_text(f"not JSON: old\n{json.dumps(line)}\n")
    options = ("--url", gateway.url, "--key", "k")

    result = await invoke(tmp_path, "trace", "old", "--json", *options)
    drawn = await invoke(tmp_path, "trace", "old", *options)

    assert json.loads(result.stdout)["stages"][0] == {"name": "queue", "ms": 4.0}
    assert "decode steps" in drawn.stdout
