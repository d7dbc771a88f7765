"""Up, down, crashes, and two meshes side by side."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from mesh.home import Home
from mesh.ports import find_free_ports
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


def test_a_mesh_of_a_known_model_is_ready_within_fifteen_seconds(mesh: RunningMesh) -> None:
    assert mesh.ready_after_s < 15


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


def test_a_second_up_in_the_same_home_is_refused(mesh: RunningMesh) -> None:
    with pytest.raises(AssertionError, match="already runs in"):
        pdmesh(mesh.home, "up", "--detach", "--port", "1")


def test_a_mesh_beside_another_cleans_what_a_killed_one_left_and_leaves_nothing(
    mesh: RunningMesh, tmp_path: Path, model_home: Path
) -> None:
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
        assert len(home.segments()) == 2
        assert first.port != again.port
        assert " Paris" in answer(again)
        assert " Paris" in answer(mesh)
        pids = [service.pid for service in again.records()]

    assert not any(psutil.pid_exists(pid) for pid in pids if pid is not None)
    assert home.segments() == []
    assert " Paris" in answer(mesh)


def test_sigint_ends_a_mesh_whose_shell_had_it_ignore_that(
    tmp_path: Path, model_home: Path
) -> None:
    """As a shell without job control does with commands that it starts in the background."""
    home = Home(tmp_path)
    (tmp_path / "models").symlink_to(model_home / "models")
    command = [sys.executable, "-m", "mesh.cli.main", "up", "--port", str(find_free_ports(1)[0])]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command],
            env=os.environ | {"PDMESH_HOME": str(tmp_path)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        # It has begun; that it is ready is not needed.
        deadline = time.monotonic() + 60
        while home.read_state() is None:
            assert process.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)  # another process has no event to wait for
        process.send_signal(signal.SIGINT)

        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        pdmesh(tmp_path, "down")
    assert home.read_state() is None
    assert home.segments() == []


def test_a_sentence_goes_on_when_its_decode_worker_is_killed(
    mesh: RunningMesh, client: openai.OpenAI
) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "prompt": "A long story about a lighthouse keeper and his dog: " * 4,
        "max_tokens": 200,
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
            [worker] = mesh.busy("decode")
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            killed = True

    assert killed
    assert reason == "length"
    assert text == undisturbed
    wait_until_whole(mesh)


def test_a_sentence_goes_on_when_nobody_else_could_take_it(
    mesh: RunningMesh, client: openai.OpenAI
) -> None:
    """All decode workers are killed: it waits for the first that is started again."""
    ask: dict[str, Any] = {
        "model": MODEL,
        "prompt": "A long story about a lighthouse without a keeper: " * 4,
        "max_tokens": 60,
        "temperature": 0.0,
        "extra_body": {"ignore_eos": True},
    }
    undisturbed = client.completions.create(**ask).choices[0].text

    text = ""
    for number, chunk in enumerate(client.completions.create(**ask, stream=True)):
        text += "".join(choice.text for choice in chunk.choices)
        if number == 5:
            for worker in mesh.records("decode"):
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGKILL)

    assert text == undisturbed
    wait_until_whole(mesh)


def wait_until_whole(mesh: RunningMesh, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not mesh.is_whole():
        assert time.monotonic() < deadline, mesh.status()
        time.sleep(0.05)  # other processes have no event to wait for
