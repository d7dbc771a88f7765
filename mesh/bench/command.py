"""From what the command line asks to a finished result."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.bench import run, target, workloads
from mesh.bench.client import Api, Endpoint, open_client
from mesh.bench.honesty import LONG_DOCUMENT_TOKENS, Claim
from mesh.bench.knee import MIN_POINTS
from mesh.bench.prompts import Lengths, Vocabulary
from mesh.bench.results import BenchResult
from mesh.bench.run import ClosedLoop, Load, OpenLoop, Plan, Replay, Stated
from mesh.bench.target import LocalMesh
from mesh.bench.workloads import Workload

DEFAULT_URL = "http://127.0.0.1:8000"


class UsageError(Exception):
    """What is asked makes no sense; the message says why."""


@dataclass(frozen=True)
class Asked:
    """The command line, read and checked."""

    workload: str
    trace_file: Path | None
    url: str | None
    model: str | None
    api: Api
    api_key: str | None
    tokenizer: Path | None
    levels: tuple[ClosedLoop | OpenLoop, ...]
    inputs: Lengths
    outputs: Lengths
    shared_tokens: int
    long_inputs: Lengths
    long_every_s: float
    speed: float
    length_scale: float
    max_tokens: int | None
    hardware: str | None
    precision: str | None
    ignore_eos: bool
    keep_alive: bool
    extra_body: dict[str, Any]
    local_mesh: LocalMesh | None

    @property
    def mesh(self) -> LocalMesh | None:
        """The local mesh, if that is what is measured."""
        if self.local_mesh is None or self.url in (None, self.local_mesh.url):
            return self.local_mesh
        return None

    @property
    def target_url(self) -> str:
        return self.url or (self.local_mesh.url if self.local_mesh else DEFAULT_URL)


async def measure(asked: Asked, plan: Plan, observer: run.Observer) -> BenchResult:
    """Find out what is missing, measure, and conclude."""
    mesh, url = asked.mesh, asked.target_url
    model = asked.model or await target.served_model(url, asked.api_key)
    is_meshs = mesh is not None and mesh.model == model
    stated = _stated(asked, model, mesh.precision if mesh and is_meshs else None)
    tokenizer = asked.tokenizer or (mesh.model_path if mesh and is_meshs else None)
    vocabulary = Vocabulary() if tokenizer is None else Vocabulary.from_folder(tokenizer)
    loads, notes = _loads(asked, vocabulary)
    endpoint = Endpoint(
        url=url,
        model=model,
        api=asked.api,
        api_key=asked.api_key,
        ignore_eos=asked.ignore_eos,
        reuses_connections=asked.keep_alive,
        extra_body=asked.extra_body,
    )
    async with open_client(endpoint) as client:
        points = await run.run_loads(client, loads, plan, observer)
    return run.conclude(
        points,
        loads,
        plan,
        stated,
        _settings(asked, plan, loads, vocabulary) | notes,
        seeks_knee=len(asked.levels) >= MIN_POINTS and isinstance(asked.levels[0], ClosedLoop),
    )


def _stated(asked: Asked, model: str, precision: str | None) -> Stated:
    hardware = asked.hardware or target.hardware_of(asked.target_url)
    if hardware is None:
        raise UsageError(
            f"say on what {asked.target_url} runs, with --hardware: numbers mean nothing without it"
        )
    precision = asked.precision or precision
    if precision is None:
        raise UsageError(f"say in which precision {model} runs, with --precision")
    return Stated(hardware, f"{model}, {precision}")


def _settings(
    asked: Asked, plan: Plan, loads: Sequence[Load], vocabulary: Vocabulary
) -> dict[str, str]:
    workload = loads[-1].workload
    return {
        "endpoint": f"{asked.target_url}, {asked.api}",
        "prompts": "token ids" if vocabulary.token_ids and asked.api != "chat" else "text",
        "input tokens": workload.input_lengths,
        "output tokens": workload.output_lengths,
        "rounds": f"{plan.num_rounds} of {plan.duration_s:g} s, and one before them, discarded",
        "seed": f"{plan.seed}",
        "ignore_eos": f"{asked.ignore_eos}",
        "connections": "reused" if asked.keep_alive else "one for each request",
        "extra body": json.dumps(asked.extra_body),
    }


def _loads(asked: Asked, vocabulary: Vocabulary) -> tuple[list[Load], dict[str, str]]:
    if asked.workload == "trace":
        return _trace_loads(asked, vocabulary)
    made: tuple[Workload, ...]
    match asked.workload:
        case "chat":
            made = (workloads.chat(vocabulary, asked.api, asked.inputs, asked.outputs),)
        case "agent":
            made = (
                workloads.agent(
                    vocabulary, asked.api, asked.shared_tokens, asked.inputs, asked.outputs
                ),
            )
        case _:
            made = workloads.interference(
                vocabulary,
                asked.api,
                asked.inputs,
                asked.outputs,
                asked.long_inputs,
                every_s=asked.long_every_s,
            )
    loads = [
        Load(_label(workload, level, len(made)), workload, level)
        for level in asked.levels
        for workload in made
    ]
    return loads, {}


def _label(workload: Workload, level: ClosedLoop | OpenLoop, num_variants: int) -> str:
    if num_variants == 1:
        return str(level)
    return f"{level}, {'calm' if workload.intruders is None else 'with long prompts'}"


def _trace_loads(asked: Asked, vocabulary: Vocabulary) -> tuple[list[Load], dict[str, str]]:
    assert asked.trace_file is not None
    file = asked.trace_file

    def timed(seed: object) -> Sequence[workloads.TimedRequest]:
        return read(seed)[0]

    def read(seed: object) -> tuple[list[workloads.TimedRequest], int]:
        return workloads.read_trace(
            file,
            vocabulary,
            seed,
            speed=asked.speed,
            length_scale=asked.length_scale,
            max_tokens=asked.max_tokens,
        )

    requests, num_too_long = read(0)
    workload = Workload(
        name=f"trace {file.name}",
        group=workloads.REQUESTS,
        requests=lambda seed: (each.request for each in timed(seed)),
        input_lengths=f"recorded times {asked.length_scale:g}",
        output_lengths=f"recorded times {asked.length_scale:g}",
        cache_state="prefixes are shared as recorded, and new in each round",
    )
    notes = {
        "trace": f"{file.name} at {asked.speed:g} times its speed: {len(requests)} requests; "
        f"{num_too_long} too long were left out"
    }
    label = f"recorded times at {asked.speed:g}x"
    return [Load(label, workload, Replay(timed))], notes


def check_claims(claims: Sequence[Claim], asked: Asked) -> None:
    """Refuse before minutes are spent, where that is certain already."""
    concurrencies = [level for level in asked.levels if isinstance(level, ClosedLoop)]
    if Claim.CAPACITY in claims and len(concurrencies) < MIN_POINTS:
        raise UsageError("--claim capacity: saturated throughput is not capacity; run with --sweep")
    if Claim.LONG_DOCUMENTS not in claims or asked.workload == "trace":
        return
    longest = asked.inputs.high
    if asked.workload == "agent":
        longest += asked.shared_tokens
    if asked.workload == "interference":
        longest = max(longest, asked.long_inputs.high)
    if longest < LONG_DOCUMENT_TOKENS:
        raise UsageError(
            f"--claim long-documents: prompts of {longest} tokens say nothing about documents "
            f"of {LONG_DOCUMENT_TOKENS} and more"
        )
