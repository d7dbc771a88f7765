"""Up, down, crashes, and two meshes side by side."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from mesh.home import Home
from mesh.supervisor import find_process
from tests.e2e.harness import MODEL, RunningMesh, pdmesh, start_mesh

ROLES = ("gateway", "tokenizer", "scheduler", "prefill", "decode", "kv_transfer", "redis")


@contextmanager
def temporary_mesh(home: Path, model_home: Path, *arguments: str) -> Iterator[RunningMesh]:
    try:
        yield start_mesh(home, model_home, *arguments)
    finally:
        pdmesh(home, "down")


def answer(mesh: RunningMesh, prompt: str = "The capital of France is") -> str:
    made = mesh.client().completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
    return made.choices[0].text


def test_status_describes_every_service(mesh: RunningMesh) -> None:
    services = mesh.status()["services"]

    for role in ROLES:
        assert any(service["name"].startswith(role) for service in services), role
    for service in services:
        assert {"name", "worker_id", "pid", "address", "state", "engine"} <= set(service)
        assert service["state"] == "ok", service
    for service in mesh.services("decode") + mesh.services("prefill"):
        assert {"blocks_total", "blocks_free", "leases", "running", "waiting"} <= set(
            service["engine"]
        )


def test_two_meshes_live_side_by_side_and_leave_nothing(
    mesh: RunningMesh, tmp_path: Path, model_home: Path
) -> None:
    with temporary_mesh(tmp_path / "other", model_home) as other:
        pids = [service["pid"] for service in other.status()["services"]]
        segments = Home(other.home).segments()
        assert " Paris" in answer(other)
        assert " Paris" in answer(mesh)
        assert len(segments) == 2

    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert Home(other.home).segments() == []
    assert " Paris" in answer(mesh)


def test_a_second_up_in_the_same_home_is_refused(mesh: RunningMesh) -> None:
    with pytest.raises(AssertionError, match="already runs in"):
        pdmesh(mesh.home, "up", "--detach", "--port", "1")


def test_the_next_up_cleans_what_a_killed_one_left(tmp_path: Path, model_home: Path) -> None:
    home = Home(tmp_path / "home")
    with temporary_mesh(home.path, model_home) as first:
        state = home.read_state()
        assert state is not None
        stopped = [find_process(service) for service in state.services]
        for process in stopped:  # so that the supervisor's death does not end them
            assert process is not None
            process.suspend()

        os.kill(state.pid, signal.SIGKILL)
        old_segments = home.segments()
        again = start_mesh(home.path, model_home)

        assert not any(process is not None and process.is_running() for process in stopped)
        assert not set(old_segments) & set(home.segments())
        assert " Paris" in answer(again)
        assert first.port != again.port


def test_a_sentence_goes_on_when_its_decode_worker_is_killed(
    mesh: RunningMesh, client: openai.OpenAI
) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "prompt": "A long story about a lighthouse keeper and his dog: " * 4,
        "max_tokens": 400,
        "temperature": 0.8,
        "seed": 11,
        "extra_body": {"ignore_eos": True},
    }
    undisturbed = client.completions.create(**ask).choices[0].text

    stream = client.completions.create(**ask, stream=True)
    text, killed, reason = "", False, None
    for number, chunk in enumerate(stream):
        for choice in chunk.choices:
            text += choice.text
            reason = choice.finish_reason or reason
        if number == 10:
            [worker] = [s for s in mesh.services("decode") if s["engine"]["running"]]
            os.kill(worker["pid"], signal.SIGKILL)
            killed = True

    assert killed
    assert reason == "length"
    assert text == undisturbed
    wait_until_all_ok(mesh)


def wait_until_all_ok(mesh: RunningMesh, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while any(service["state"] != "ok" for service in mesh.status()["services"]):
        assert time.monotonic() < deadline, mesh.status()
