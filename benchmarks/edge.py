"""What the edge costs: time before the first token, tokens/s beside a bare engine, and nginx."""

import asyncio
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import orjson
import psutil
import yaml

from benchmarks.contenders import Launch
from benchmarks.processes import running
from decode_svc.config import DecodeConfig
from engine.engine import Engine
from engine.request import Request, RequestFailed, TokenOutput
from engine.sampling import SamplingParams
from gateway.keys.model import Caller, Limits
from gateway.limits.limiter import Limiter
from gateway.rules.lua import compile_to_lua
from gateway.rules.model import RuleSet
from mesh.bench.client import (
    Endpoint,
    PlannedRequest,
    Recording,
    open_client,
    parse_server_timing,
)
from mesh.bench.prompts import PromptMaker, Vocabulary
from mesh.home import Home
from mesh.launch import threads_of_a_worker
from mesh.ports import find_free_ports
from mesh.redis_client import connect_redis
from worker.engine_loading import load_engine

STREAMS = 16
# Of the first token's time, what the engine itself takes.
ENGINE_STAGES = ("prefill_wait", "prefill_compute")

_NGINX = Path(__file__).parents[1] / "deploy" / "openresty"


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    num_single: int = 40
    num_rounds: int = 4
    single_prompt_tokens: int = 200
    prompt_tokens: int = 64
    max_tokens: int = 96


@dataclass
class Streams:
    """What several streams at once came to, over all rounds."""

    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    # One a round.
    tokens_per_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        return {
            "ttft_p50_ms": _percentile(self.ttft_ms, 50),
            "ttft_p99_ms": _percentile(self.ttft_ms, 99),
            "gap_p50_ms": _percentile(self.gaps_ms, 50),
            "gap_p99_ms": _percentile(self.gaps_ms, 99),
            "tokens_per_s": round(statistics.median(self.tokens_per_s), 1),
        }


class Prompts:
    """Prompts that no cache has seen."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._maker = PromptMaker(vocabulary, time.time())

    def plan(self, num_tokens: int, max_tokens: int) -> PlannedRequest:
        return PlannedRequest(self._maker.text(num_tokens), max_tokens)

    def token_ids(self, num_tokens: int) -> list[int]:
        prompt = self._maker.prompt(num_tokens)
        assert isinstance(prompt, list), "the model has a tokenizer"
        return prompt


def first_token_costs(url: str, model: str, prompts: Prompts, plan: Plan) -> dict[str, float]:
    """Medians, of one request at a time: the whole, the engine's part, and each stage.

    From the first byte sent to the first event read, on a bare socket: what a client's library
    does with them is neither the engine's nor the edge's.
    """
    totals: list[float] = []
    costs: list[float] = []
    stages: dict[str, list[float]] = {}
    host, _, port = url.removeprefix("http://").partition(":")
    # Clients keep their connections.
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(plan.num_single + 5):
            planned = prompts.plan(plan.single_prompt_tokens, 2)
            ttft_ms, stages_ms = _first_token(connection, host, model, planned)
            if number < 5:
                continue
            totals.append(ttft_ms)
            costs.append(ttft_ms - sum(stages_ms.get(name, 0.0) for name in ENGINE_STAGES))
            for name, duration_ms in stages_ms.items():
                stages.setdefault(name, []).append(duration_ms)
    return {
        "ttft_p50_ms": _percentile(totals, 50),
        "not_the_engine_p50_ms": _percentile(costs, 50),
        "not_the_engine_p95_ms": _percentile(costs, 95),
        **{f"stage_{name}_p50_ms": _percentile(values, 50) for name, values in stages.items()},
    }


def _first_token(
    connection: socket.socket, host: str, model: str, planned: PlannedRequest
) -> tuple[float, dict[str, float]]:
    """How long the first token took, and what of it the server accounts for, in milliseconds."""
    body = orjson.dumps(
        {
            "model": model,
            "prompt": planned.prompt,
            "max_tokens": planned.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    started_at = time.perf_counter()
    connection.sendall(head.encode() + body)
    answer = _read_until(connection, b"data: ", b"")
    ttft_ms = (time.perf_counter() - started_at) * 1000
    # The end of the last chunk.
    _read_until(connection, b"\r\n0\r\n\r\n", answer)
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(answer.decode(errors="replace"))
    timing = re.search(rb"\r\nserver-timing: (.*?)\r\n", answer)
    return ttft_ms, parse_server_timing("" if timing is None else timing[1].decode())


def _read_until(connection: socket.socket, end: bytes, received: bytes) -> bytes:
    while end not in received:
        data = connection.recv(1 << 16)
        if not data:
            raise RuntimeError(received.decode(errors="replace") or "the server hung up")
        received += data
    return received


async def limit_costs(redis_url: str, plan: Plan) -> dict[str, float]:
    """How long a request waits to learn that the limits of its key and group allow it."""
    limits = Limits(requests_per_minute=10**6, tokens_per_minute=10**9, max_concurrency=1000)
    caller = Caller("bench", "bench", "bench", key_limits=limits, group_limits=limits)
    redis = connect_redis(redis_url)
    waits_ms: list[float] = []
    async with Limiter(redis) as limiter:
        for number in range(5 * plan.num_single + 5):
            started_at = time.perf_counter()
            async with limiter.admitted(caller, plan.single_prompt_tokens):
                if number >= 5:
                    waits_ms.append((time.perf_counter() - started_at) * 1000)
    await redis.aclose()
    return {"admit_p50_ms": _percentile(waits_ms, 50), "admit_p99_ms": _percentile(waits_ms, 99)}


async def through_nginx(
    url: str, model: str, prompts: Prompts, plan: Plan, folder: Path
) -> dict[str, dict[str, float]]:
    """The same loads with and without nginx, in turns."""
    direct, proxied = Streams(), Streams()
    with _nginx(url, folder) as proxy_url:
        for number in range(plan.num_rounds + 1):
            for through, streams in ((url, direct), (proxy_url, proxied)):
                measured = Streams() if number == 0 else streams
                await _load(through, model, prompts, plan, measured)
    return {"direct": direct.summary(), "nginx": proxied.summary()}


async def beside_bare_engine(
    url: str, model: str, folder: Path, prompts: Prompts, plan: Plan, num_threads: int
) -> dict[str, float]:
    """tokens/s of the mesh, and of the same engine in this process, in turns."""
    settings = {
        "model": model,
        "model_path": folder,
        "num_threads": num_threads,
        "segment_prefix": "pdmesh-edge-",
        # It has to be one, and nobody calls it.
        "kv_transfer_address": "127.0.0.1:9",
    }
    config = DecodeConfig.model_validate(settings)
    engine = (await asyncio.to_thread(load_engine, config, "bench")).engine
    whole = Streams()
    bare: list[float] = []
    try:
        for number in range(plan.num_rounds + 1):
            await _load(url, model, prompts, plan, Streams() if number == 0 else whole)
            rate = await asyncio.to_thread(_run_bare, engine, prompts, plan)
            if number > 0:
                bare.append(rate)
    finally:
        engine.close()
    mesh = statistics.median(whole.tokens_per_s)
    alone = statistics.median(bare)
    return {
        "mesh_tokens_per_s": round(mesh, 1),
        "engine_tokens_per_s": round(alone, 1),
        "ratio": round(mesh / alone, 3),
    }


async def measure_edge(
    model: Path, folder: Path, mode: str, num_rounds: int, parts: Sequence[str]
) -> dict[str, object]:
    """Start a mesh and measure the chosen parts."""
    plan = Plan(num_rounds=num_rounds)
    vocabulary = Vocabulary.from_folder(model)
    prompts = Prompts(vocabulary)
    [port] = find_free_ports(1)
    home, nginx = folder / "home", folder / "nginx"
    home.mkdir()
    num_cores = psutil.cpu_count() or 1
    result: dict[str, object] = {"mode": mode, "cores": num_cores, "streams": STREAMS}
    async with running_mesh(model, port, home, mode) as url:
        if "cost" in parts:
            result["first_token"] = await asyncio.to_thread(
                first_token_costs, url, model.name, prompts, plan
            )
        if "limits" in parts:
            topology = yaml.safe_load(Home(home).topology_file.read_text())
            result["limits"] = await limit_costs(topology["redis_url"], plan)
        if "nginx" in parts:
            result["nginx"] = await through_nginx(url, model.name, prompts, plan, nginx)
        if "engine" in parts:
            threads = threads_of_a_worker(num_cores, num_prefill=1, num_decode=1)
            result["engine"] = await beside_bare_engine(
                url, model.name, model, prompts, plan, threads
            )
    return result


@asynccontextmanager
async def running_mesh(model: Path, port: int, folder: Path, mode: str) -> AsyncIterator[str]:
    """`pdmesh up` with its defaults but for the mode; yields the URL."""
    command = str(Path(sys.executable).parent / "pdmesh")
    launch = Launch(
        argv=(
            *(command, "up", "--home", str(folder), "--model", str(model), "--port", str(port)),
            *("--log-level", "WARNING", "--set", f"scheduler.mode={mode}"),
        ),
        environment={},
        model=model.name,
        needs=(),
        start_timeout_s=180.0,
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PDMESH_")
    }
    async with running(launch, port, folder / "bench.log", environment) as server:
        yield server.url


async def _load(url: str, model: str, prompts: Prompts, plan: Plan, streams: Streams) -> None:
    planned = [prompts.plan(plan.prompt_tokens, plan.max_tokens) for _ in range(STREAMS)]
    started_at = time.perf_counter()
    recordings = await _stream(url, model, planned)
    elapsed_s = time.perf_counter() - started_at
    for recording in recordings:
        times = recording.token_times
        streams.ttft_ms.append((times[0] - recording.started_at) * 1000)
        streams.gaps_ms += [(after - before) * 1000 for before, after in pairwise(times)]
    streams.tokens_per_s.append(sum(one.num_output_tokens for one in recordings) / elapsed_s)


async def _stream(url: str, model: str, planned: Sequence[PlannedRequest]) -> list[Recording]:
    async with open_client(Endpoint(url, model, reuses_connections=True)) as client:
        recordings = [Recording("edge", time.perf_counter()) for _ in planned]
        await asyncio.gather(*map(client.stream, planned, recordings))
    for recording in recordings:
        _check(recording)
    return recordings


def _check(recording: Recording) -> None:
    if recording.error is not None:
        raise RuntimeError(recording.error)


def _run_bare(engine: Engine, prompts: Prompts, plan: Plan) -> float:
    """tokens/s of one round."""
    params = SamplingParams(max_tokens=plan.max_tokens, temperature=0.0, ignore_eos=True)
    requests = [
        Request(f"r{number}", prompts.token_ids(plan.prompt_tokens), params)
        for number in range(STREAMS)
    ]
    started_at = time.perf_counter()
    for request in requests:
        engine.add_request(request)
    num_running = len(requests)
    while num_running:
        for event in engine.step():
            if isinstance(event, RequestFailed):
                raise event.error
            num_running -= isinstance(event, TokenOutput) and event.is_last
    return STREAMS * plan.max_tokens / (time.perf_counter() - started_at)


@contextmanager
def _nginx(url: str, folder: Path) -> Iterator[str]:
    """The shipped nginx.conf before `url`, without rules."""
    [port] = find_free_ports(1)
    shutil.copytree(_NGINX, folder, dirs_exist_ok=True)
    conf = folder / "nginx.conf"
    text = conf.read_text()
    for old, new in (
        ("listen 8080;", f"listen 127.0.0.1:{port};"),
        ("server 127.0.0.1:8000", f"server {url.removeprefix('http://')}"),
        ("worker_processes auto;", "worker_processes 1;\nuser root;"),
        ("/dev/stdout", f"{folder}/access.log"),
    ):
        if old not in text:
            raise RuntimeError(f"nginx.conf has no {old!r}")
        text = text.replace(old, new)
    conf.write_text(text)
    (folder / "rules.lua").write_text(compile_to_lua(RuleSet(), "none"))
    process = subprocess.Popen(
        ["nginx", "-p", str(folder), "-c", "nginx.conf", "-e", f"{folder}/error.log"]
    )
    try:
        _wait_until_listening(process, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=10)


def _wait_until_listening(process: subprocess.Popen[bytes], port: int) -> None:
    give_up_at = time.perf_counter() + 20
    while time.perf_counter() < give_up_at:
        if process.poll() is not None:
            raise RuntimeError("nginx ended; is libnginx-mod-http-lua installed?")
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise RuntimeError("nginx does not listen")


def _percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 3)
