"""Workers leave and join the running mesh, under load."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from mesh.home import Home
from tests.e2e.harness import MODEL, RunningMesh

ASK: dict[str, Any] = {
    "model": MODEL,
    "prompt": "A long story about a lighthouse keeper and his dog: " * 4,
    "max_tokens": 400,
    "temperature": 0.8,
    "seed": 12,
    "extra_body": {"ignore_eos": True},
}


def test_a_drained_worker_loses_no_stream_and_does_not_come_back(
    mesh: RunningMesh, client: openai.OpenAI
) -> None:
    undisturbed = client.completions.create(**ASK).choices[0].text
    stream = client.completions.create(**ASK, stream=True)
    text, reason, drain = "", None, None
    for number, chunk in enumerate(stream):
        for choice in chunk.choices:
            text += choice.text
            reason = choice.finish_reason or reason
        if number == 10:
            [worker] = mesh.busy("decode")
            drain = start_pdmesh(mesh.home, "drain", worker.name)

    assert drain is not None
    assert "is drained" in finish(drain)
    assert (text, reason) == (undisturbed, "length")
    assert worker.name not in names(mesh, "decode")
    assert len(names(mesh, "decode")) == 1
    assert " Paris" in answer(client)

    assert mesh.pdmesh("scale", "decode=2") == f"{worker.name} serves\n"
    assert names(mesh, "decode") == {"decode-0", "decode-1"}


def test_a_worker_is_replaced_by_a_new_process_without_failing_a_request(
    mesh: RunningMesh, client: openai.OpenAI
) -> None:
    [before] = mesh.records("decode-0")

    restart = start_pdmesh(mesh.home, "drain", "decode-0", "--restart")
    while restart.poll() is None:
        assert " Paris" in answer(client)

    assert "and serves again" in finish(restart)
    [after] = mesh.records("decode-0")
    assert after.pid != before.pid
    assert after.state == "running"


def test_a_mesh_serves_without_the_prefill_worker_that_left(
    mesh: RunningMesh, client: openai.OpenAI
) -> None:
    """It is made for disaggregation only, so the second one has to be there first."""
    assert mesh.pdmesh("scale", "prefill=2") == "prefill-1 serves\n"

    assert "is drained" in mesh.pdmesh("drain", "prefill-0")
    assert " Paris" in answer(client)

    assert mesh.pdmesh("scale", "prefill=2") == "prefill-0 serves\n"
    assert mesh.pdmesh("scale", "prefill=1") == "prefill-1 is drained\n"


def test_a_worker_started_by_hand_joins_and_leaves(
    mesh: RunningMesh, client: openai.OpenAI
) -> None:
    assert mesh.pdmesh("drain", "decode-1").startswith("decode-1 is drained")
    with worker_by_hand(mesh) as process:
        wait_until(lambda: "by-hand" in placed_workers(mesh))
        mesh.pdmesh("drain", "decode-0", "--force")
        assert " Paris" in answer(client)
        assert mesh.pdmesh("scale", "decode=2") == "decode-0 serves\ndecode-1 serves\n"

        refused = start_pdmesh(mesh.home, "drain", "by-hand")
        assert "drains on SIGTERM" in finish(refused, expected=1)
        process.terminate()
        assert process.wait(timeout=30) == 0
    wait_until(lambda: "by-hand" not in placed_workers(mesh))
    assert " Paris" in answer(client)


@contextmanager
def worker_by_hand(mesh: RunningMesh) -> "Iterator[subprocess.Popen[bytes]]":
    """With nothing but the mesh's topology file."""
    topology = Home(mesh.home).topology_file
    environment = {"PDMESH_TOPOLOGY": str(topology), "PDMESH_WORKER_ID": "by-hand"}
    with (
        (mesh.home / "logs" / "by-hand.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "decode_svc"],
            env=os.environ | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def placed_workers(mesh: RunningMesh) -> set[str]:
    """The workers that the scheduler may choose."""
    [scheduler] = mesh.services("scheduler")
    return {worker["worker_id"] for worker in scheduler["workers"]}


def names(mesh: RunningMesh, role: str) -> set[str]:
    return {service.name for service in mesh.records(role)}


def answer(client: openai.OpenAI) -> str:
    made = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0
    )
    return made.choices[0].text


def start_pdmesh(home: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "mesh.cli.main", *arguments],
        env={**os.environ, "PDMESH_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: "subprocess.Popen[str]", expected: int = 0) -> str:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == expected, output
    return output


def wait_until(condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
