"""The harness: servers are started, measured, compared round by round, and ended."""

import json
import sys
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from benchmarks.comparison import Comparison, Measurement, Schedule
from benchmarks.contenders import OURS, Contender, Launch, Place, contenders
from benchmarks.points import DEFAULT_POINTS, BenchPoint
from benchmarks.processes import StartFailed, running
from benchmarks.settings import BenchmarkSettings
from benchmarks.summary import floor_rows, markdown, ratio, spread
from mesh.bench.prompts import Vocabulary
from mesh.ports import find_free_ports

# A server with a child, as real ones have.
SERVER = dedent(
    """
    import asyncio, subprocess, sys
    from aiohttp import web
    sys.path.insert(0, {root!r})
    from tests.bench.fake_endpoint import FakeEndpoint
    endpoint = FakeEndpoint(pause_s={pause_s})
    async def health(request): return web.Response()
    async def children(request): return web.json_response([child.pid])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    app = web.Application(client_max_size=1 << 24)
    app.router.add_get("/health", health)
    app.router.add_get("/children", children)
    app.router.add_post("/v1/completions", endpoint.route)
    web.run_app(app, host="127.0.0.1", port={port}, print=None)
    """
)
ROOT = str(Path(__file__).parents[2])


def fake_launch(port: int, pause_s: float = 0.001) -> Launch:
    code = SERVER.format(root=ROOT, port=port, pause_s=pause_s)
    return Launch((sys.executable, "-c", code), {}, "m", (), start_timeout_s=30)


def fake_contender(name: str, pause_s: float) -> Contender:
    return Contender(name, "none", lambda point, place: fake_launch(place.port, pause_s))


@pytest.mark.parametrize("text", DEFAULT_POINTS)
def test_points_are_read_as_they_are_written(text: str) -> None:
    assert str(BenchPoint.parse(text)) == text


@pytest.mark.parametrize("text", ["", "W1", "W1:0", "W1:x", "W3:4", "W4:1"])
def test_other_points_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected W1"):
        BenchPoint.parse(text)


def test_peers_get_the_configuration_that_serves_a_load_best(tmp_path: Path) -> None:
    settings = BenchmarkSettings(llama_server=Path("/l"), vllm=Path("/v"), model=tmp_path)
    known = contenders(settings, ("--dtype", "bfloat16"))

    def argv(name: str, point: str) -> str:
        place = Place(9, tmp_path)
        return " ".join(known[name].launch(BenchPoint.parse(point), place).argv)

    assert "-np 1 -c 2048 -fa on" in argv("llama.cpp-Q4_1", "W1:1")
    assert "-np 8 -c 16384 -fa off" in argv("llama.cpp-Q8_0", "W2:8")
    assert "-np 16 -c 32768 -fa off" in argv("llama.cpp-BF16", "W1:16")
    assert "-np 5 -c 40960 -b 256 -ub 256" in argv("llama.cpp-BF16", "W3L")
    assert "--max-num-batched-tokens" not in argv("vllm", "W1:8")
    assert "--max-num-batched-tokens 512" in argv("vllm", "W3")
    assert argv(OURS, "W1:1").endswith("--dtype bfloat16")


def test_a_peer_that_is_not_installed_is_known_before_anything_runs(tmp_path: Path) -> None:
    settings = BenchmarkSettings(llama_server=tmp_path / "none", gguf_folder=tmp_path)

    launch = contenders(settings)["llama.cpp-Q8_0"].launch(BenchPoint("W1", 1), Place(1, tmp_path))

    assert launch.missing == [
        tmp_path / "none",
        tmp_path / "SmolLM2-135M-Instruct-Q8_0.gguf",
    ]


async def test_a_server_is_measured_and_ended_with_its_children(tmp_path: Path) -> None:
    (port,) = find_free_ports(1)

    async with running(fake_launch(port), port, tmp_path / "log", {}) as server:
        tree = [server.process, *server.process.children(recursive=True)]
        memory = server.memory()

    assert memory.num_processes == len(tree) == 2
    assert 0 < memory.pss_mib <= memory.rss_mib
    _, alive = psutil.wait_procs(tree, timeout=20)
    assert alive == []


async def test_a_server_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    launch = Launch((sys.executable, "-c", "raise SystemExit('no model')"), {}, "m", ())

    with pytest.raises(StartFailed, match="no model"):
        async with running(launch, 1, tmp_path / "log", {}):
            pass


async def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path: Path) -> None:
    sleep = "import time; print('asleep', flush=True); time.sleep(600)"
    launch = Launch((sys.executable, "-c", sleep), {}, "m", (), start_timeout_s=0.5)
    (port,) = find_free_ports(1)

    with pytest.raises(StartFailed, match="asleep"):
        async with running(launch, port, tmp_path / "log", {}):
            pass


async def test_rounds_are_interleaved_and_the_first_one_is_discarded(tmp_path: Path) -> None:
    said: list[str] = []
    comparison = Comparison(
        [fake_contender(OURS, 0.001), fake_contender("peer", 0.004)],
        [BenchPoint("W1", 2)],
        Schedule(num_rounds=1, num_discarded=1, duration_s=0.5, warm_up_s=0.1, grace_s=5),
        Vocabulary(),
        logs=tmp_path,
        environment={},
        report=said.append,
    )

    measurements = await comparison.run()

    assert [(m.contender, m.round_index) for m in measurements] == [("peer", 0), (OURS, 0)]
    # Another server begins each round.
    assert [line.split()[0] for line in said] == ["round", OURS, "peer", "round", "peer", OURS]
    assert all(m.num_errors == 0 and m.tokens_per_s > 0 for m in measurements)
    found = ratio(measurements, "W1:2", "tokens_per_s")
    assert found is not None
    assert found.peer == "peer"
    theirs, ours = (m.tokens_per_s for m in measurements)
    assert found.spread.median == pytest.approx(ours / theirs, rel=0.01)
    assert json.dumps([m.as_dict() for m in measurements])


async def test_a_server_that_does_not_start_does_not_stop_the_others(tmp_path: Path) -> None:
    broken = Contender(
        "broken",
        "none",
        lambda point, place: Launch((sys.executable, "-c", "raise SystemExit(3)"), {}, "m", ()),
    )
    comparison = Comparison(
        [broken, fake_contender(OURS, 0.001)],
        [BenchPoint("W1", 1)],
        Schedule(num_rounds=1, num_discarded=0, duration_s=0.2, warm_up_s=0.1, grace_s=5),
        Vocabulary(),
        logs=tmp_path,
        environment={},
        report=lambda line: None,
    )

    measurements = await comparison.run()

    assert [m.contender for m in measurements] == [OURS]
    assert len(comparison.failures) == 1


def measurement(
    contender: str, point: str, round_index: int, tokens_per_s: float = 100.0, **values: float
) -> Measurement:
    fields = {
        **dict.fromkeys(
            ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "itl_p50_ms", "itl_p99_ms"), 10.0
        ),
        **{"itl_max_ms": 10.0, "long_ttft_p50_ms": None, "prompt_tokens": 64.0},
        **{"cached_tokens": 0.0, "pss_mib": 1000.0, "rss_mib": 2000.0},
        **{"server_cpu": 1.0, "client_cpu": 0.1, "start_s": 1.0},
        **values,
    }
    return Measurement(
        contender=contender,
        point=point,
        round_index=round_index,
        num_requests=10,
        num_errors=0,
        errors=(),
        tokens_per_s=tokens_per_s,
        num_processes=1,
        **fields,  # type: ignore[arg-type]
    )


def test_ratios_pair_the_rounds_with_the_best_peers() -> None:
    measurements = [
        *(measurement(OURS, "W1:1", i, value) for i, value in enumerate((200, 220, 260))),
        *(measurement("a", "W1:1", i, value) for i, value in enumerate((100, 110, 100))),
        *(measurement("b", "W1:1", i, value) for i, value in enumerate((50, 400, 40))),
    ]

    found = ratio(measurements, "W1:1", "tokens_per_s")

    assert found is not None
    # One lucky round does not make the best peer: its median does.
    assert found.peer == "a"
    assert (found.spread.median, found.spread.low, found.spread.high) == (2.0, 2.0, 2.6)


def test_the_best_peer_of_a_latency_is_the_fastest() -> None:
    measurements = [
        measurement(OURS, "W1:1", 0, ttft_p50_ms=50.0),
        measurement("slow", "W1:1", 0, ttft_p50_ms=200.0),
        measurement("fast", "W1:1", 0, ttft_p50_ms=100.0),
    ]

    found = ratio(measurements, "W1:1", "ttft_p50_ms")

    assert found is not None
    assert (found.peer, found.spread.median) == ("fast", 0.5)


def test_floors_are_judged_from_medians() -> None:
    measurements = [
        measurement(OURS, "W1:1", 0, 180.0, ttft_p50_ms=60.0),
        measurement("peer", "W1:1", 0, 100.0, ttft_p50_ms=100.0),
        measurement(OURS, "W3", 0, itl_p99_ms=20.0),
        measurement(OURS, "W3L", 0, itl_p99_ms=30.0, itl_max_ms=90.0, pss_mib=2600.0),
        measurement("peer", "W3L", 0, itl_max_ms=1000.0),
    ]

    found = {
        (point, metric, bound): verdict
        for point, metric, bound, _, verdict in (floor_rows(measurements))
    }

    assert found[("W1:1", "tokens/s", "at least 1.7 x the best peer's")] == "met"
    assert found[("W1:1", "TTFT P50 ms", "at most 0.5 x the best peer's")] == "missed"
    assert found[("W3L", "ITL max ms", "at most 0.1 x the best peer's")] == "met"
    assert found[("W3L", "ITL P99 ms", "at most 2 x the calm run's")] == "met"
    assert found[("W3L", "PSS MiB", "at most 2.5e+03")] == "missed"


def test_tables_name_servers_medians_and_spread() -> None:
    measurements = [measurement(OURS, "W1:1", i, value) for i, value in enumerate((1, 2, 4))]

    text = markdown(measurements)

    assert "| pdmesh | 2.0 (1.0 to 4.0) |" in text
    assert spread(measurements, "nobody", "W1:1", "tokens_per_s") is None
