"""`pdmesh bench` from the command line against a real socket."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mesh.bench.results import BenchResult
from mesh.cli.bench import bench
from tests.bench.fake_endpoint import FakeEndpoint, serving
from tests.bench.made import point, recording, result, window


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    """Served by a loop of its own: the command has one too."""
    endpoint = FakeEndpoint(pause_s=0.001)
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with serving(endpoint):
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield endpoint
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def run(*arguments: str, home: Path) -> Any:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, [*arguments, "--home", str(home)])


QUICK = ("--rounds", "1", "--duration-s", "0.2", "--grace-s", "5", "--output-tokens", "3")


@pytest.mark.parametrize("option", ["--output", "--report"])
def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    endpoint: FakeEndpoint, tmp_path: Path, option: str
) -> None:
    lost = str(tmp_path / "nowhere" / "r")

    found = run("chat", "--url", endpoint.url, *QUICK, option, lost, home=tmp_path)

    assert found.exit_code == 2
    assert "nowhere" in found.output
    assert endpoint.bodies == []


def test_a_run_writes_its_result_and_its_report(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    found = run(
        *("chat", "--url", endpoint.url, "--precision", "float32", "--concurrency", "1,2"),
        *QUICK,
        *("--output", str(tmp_path / "r.json"), "--report", str(tmp_path / "r.html")),
        *("--goodput", "ttft:1000"),
        home=tmp_path,
    )

    assert found.exit_code == 0, found.output
    made = BenchResult.read(tmp_path / "r.json")
    assert [point.label for point in made.points] == ["1 at once", "2 at once"]
    assert all(len(point.rounds) == 1 for point in made.points)
    assert all(vars(made.facts).values())
    assert "cores" in made.facts.hardware
    assert "m, float32" in made.facts.model_and_precision
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert "tokens/s" in found.output
    # Two loads, and the discarded round of each: more was asked than is reported.
    kept = sum(point.pooled["requests"].num_requests for point in made.points)
    assert len(endpoint.bodies) > kept


def test_json_goes_to_stdout(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    found = run(
        *("agent", "--url", endpoint.url, "--precision", "x", "--concurrency", "1", "--json"),
        *QUICK,
        *("--shared-tokens", "20", "--api", "chat"),
        home=tmp_path,
    )

    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["workload"] == "agent"
    assert {len(body["messages"]) for body in endpoint.bodies} == {2}


def test_open_loops_state_their_rate(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    found = run(
        *("chat", "--url", endpoint.url, "--precision", "x", "--rate", "40"),
        *QUICK,
        *("--output", str(tmp_path / "r.json")),
        home=tmp_path,
    )

    assert found.exit_code == 0, found.output
    made = BenchResult.read(tmp_path / "r.json")
    assert made.points[0].rate == 40
    assert "Poisson" in made.facts.concurrency


def test_a_trace_is_replayed(endpoint: FakeEndpoint, tmp_path: Path, smollm2_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": at, "input_length": 600, "output_length": 3, "hash_ids": [1, at]}
        for at in (0, 50, 100)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))

    found = run(
        *("trace", str(trace), "--url", endpoint.url, "--precision", "x", "--rounds", "1"),
        *("--tokenizer", str(smollm2_path), "--output", str(tmp_path / "r.json")),
        home=tmp_path,
    )

    assert found.exit_code == 0, found.output
    made = BenchResult.read(tmp_path / "r.json")
    assert made.points[0].pooled["requests"].num_requests == 3
    assert {len(body["prompt"]) for body in endpoint.bodies} == {600}


def test_failed_requests_fail_the_command(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    endpoint.status = 500

    found = run("chat", "--url", endpoint.url, "--precision", "x", *QUICK, home=tmp_path)

    assert found.exit_code == 1
    assert "HTTP 500" in found.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "name a workload"),
        (("chatter",), "name a workload"),
        (("trace",), "takes a FILE"),
        (("chat", "file"), "takes a FILE"),
        (("chat", "--concurrency", "1", "--rate", "2"), "exclude"),
        (("chat", "--concurrency", "1.5"), "--concurrency"),
        (("chat", "--concurrency", "0"), "--concurrency"),
        (("chat", "--rate", "x"), "--rate"),
        (("chat", "--api", "soap"), "--api"),
        (("chat", "--extra-body", "[]"), "--extra-body"),
        (("chat", "--input-tokens", "9:3"), "9:3"),
        (("chat", "--goodput", "speed:3"), "speed:3"),
        (("interference", "--rate", "1"), "closed loop"),
        (("chat", "--claim", "capacity"), "saturated throughput is not capacity"),
        (("chat", "--claim", "long-documents"), "long-documents"),
        (("--render", "x.json"), "--report"),
        (("--compare", "x.json", "y.json"), "x.json"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_sent(
    arguments: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    found = run(*arguments, home=tmp_path)

    assert found.exit_code == 2
    assert named in found.output


def test_an_endpoint_elsewhere_needs_its_hardware_stated(
    endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    found = run(
        *("chat", "--url", "http://elsewhere.invalid", "--model", "m", "--precision", "x"),
        home=tmp_path,
    )

    assert found.exit_code == 2
    assert "--hardware" in found.output


def test_a_precision_that_nobody_knows_must_be_stated(
    endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    found = run("chat", "--url", endpoint.url, home=tmp_path)

    assert found.exit_code == 2
    assert "--precision" in found.output


def test_several_models_must_be_chosen_from(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    endpoint.models = ("a", "b")

    found = run("chat", "--url", endpoint.url, home=tmp_path)

    assert found.exit_code == 1
    assert "a, b" in found.output


def test_nobody_listening_is_said(tmp_path: Path) -> None:
    found = run("chat", "--url", "http://127.0.0.1:1", home=tmp_path)

    assert found.exit_code == 1
    assert "127.0.0.1:1" in found.output


def test_two_results_are_compared(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        made = result([point("1 at once", 1, [window([recording()])])])
        path.write_bytes(made.to_json())

    as_json = run("--compare", *map(str, paths), "--json", home=tmp_path)
    as_table = run("--compare", *map(str, paths), home=tmp_path)

    assert as_json.exit_code == as_table.exit_code == 0, as_json.output
    # One round each: nothing can be shown.
    assert {each["verdict"] for each in json.loads(as_json.stdout)} == {"too few rounds"}
    assert "TTFT P50 ms" in as_table.output


def test_a_report_can_be_made_later(tmp_path: Path) -> None:
    output, report = tmp_path / "r.json", tmp_path / "r.html"
    output.write_bytes(result([point("1 at once", 1, [window([recording()])])]).to_json())

    found = run("--render", str(output), "--report", str(report), home=tmp_path)

    assert found.exit_code == 0, found.output
    assert "<svg" in report.read_text()
