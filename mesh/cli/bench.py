"""`pdmesh bench`: load an OpenAI endpoint, and report what holds up."""

import asyncio
import json
import random
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mesh.bench import target
from mesh.bench.client import Api
from mesh.bench.command import Asked, UsageError, check_claims, measure
from mesh.bench.compare import Difference, NotComparable, compare
from mesh.bench.honesty import Claim
from mesh.bench.prompts import Lengths
from mesh.bench.report import ReportRefused, render
from mesh.bench.results import BenchResult, InvalidResult, Objectives
from mesh.bench.run import BenchFailed, ClosedLoop, OpenLoop, Plan
from mesh.bench.target import TargetError
from mesh.bench.terminal import Bars, print_comparison, print_result
from mesh.bench.workloads import TraceError
from mesh.cli.options import DEFAULT_HOME, HomeOption, fail, home_at

SWEEP = (1, 2, 4, 8, 16, 32)
WORKLOADS = ("chat", "agent", "interference", "trace")

# Tokens in and out where the command line is silent.
_DEFAULT_LENGTHS = {
    "chat": ("64", "128"),
    "agent": ("100", "64"),
    "interference": ("64", "256"),
    "trace": ("1", "1"),
}
_DEFAULT_CONCURRENCY = {"chat": 8, "agent": 8, "interference": 4}


def bench(
    workload: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(WORKLOADS)}.", show_default=False)
    ] = None,
    trace_file: Annotated[
        Path | None,
        typer.Argument(help="For `trace`: Mooncake's JSONL.", metavar="FILE", show_default=False),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="The endpoint; default: the mesh that runs in this home.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the only one served.")] = None,
    api: Annotated[str, typer.Option(help="`completions` or `chat`.")] = "completions",
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as the bearer token.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json or its folder, for exact prompt lengths.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Closed loop: requests at once; several as 1,2,4.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option(help=f"Find the knee over {', '.join(map(str, SWEEP))} at once.")
    ] = False,
    rate: Annotated[
        str | None, typer.Option(help="Open loop: arrivals a second; several as 1,2,4.")
    ] = None,
    input_tokens: Annotated[
        str | None, typer.Option(help="Tokens of a prompt: N, or LOW:HIGH.")
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option(help="Tokens of an answer: N, or LOW:HIGH.")
    ] = None,
    shared_tokens: Annotated[int, typer.Option(min=1, help="`agent`: shared prefix.")] = 1500,
    long_tokens: Annotated[str, typer.Option(help="`interference`: long prompts.")] = "4000",
    long_every_s: Annotated[
        float, typer.Option(min=0.1, help="`interference`: from one long prompt to the next.")
    ] = 5.0,
    speed: Annotated[float, typer.Option(min=0.001, help="`trace`: times as fast.")] = 1.0,
    length_scale: Annotated[
        float, typer.Option(min=0.0001, max=1, help="`trace`: shrink all lengths.")
    ] = 1.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="`trace`: leave out requests above this.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, beside the first.")] = 5,
    duration_s: Annotated[float, typer.Option(min=0.1, help="Seconds of a round.")] = 20.0,
    grace_s: Annotated[
        float, typer.Option(min=0, help="Seconds more for what is in flight.")
    ] = 30.0,
    goodput: Annotated[
        list[str] | None, typer.Option(help="An objective in ms: ttft:500, tpot:50, e2e:5000.")
    ] = None,
    claim: Annotated[
        list[Claim] | None, typer.Option(help="Refuse unless the numbers can carry this.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="The server's machine, where it is not this one.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="The model's precision.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for answers of full length (vLLM's extension).")
    ] = True,
    keep_alive: Annotated[bool, typer.Option(help="Reuse connections.")] = False,
    extra_body: Annotated[str, typer.Option(help="JSON object merged into each body.")] = "{}",
    seed: Annotated[
        int | None, typer.Option(help="Of prompts and arrivals; default: a new one.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the report as HTML.")] = None,
    render_file: Annotated[
        Path | None, typer.Option("--render", help="Make --report from an earlier result.")
    ] = None,
    compare_files: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A.json B.json", help="Tell signal from noise."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Measure an OpenAI endpoint: TTFT, TPOT, ITL, end to end, goodput, and the knee."""
    claims = tuple(claim or ())
    try:
        if compare_files is not None:
            _compare(*compare_files, as_json=as_json)
            return
        if render_file is not None:
            if report is None:
                raise UsageError("--render needs --report FILE")
            report.write_text(render(BenchResult.read(render_file), claims), encoding="utf-8")
            return
        asked = Asked(
            workload=_workload_name(workload, trace_file),
            trace_file=trace_file,
            url=url,
            model=model,
            api=_api(api),
            api_key=api_key,
            tokenizer=tokenizer,
            levels=_levels(concurrency, rate, sweep=sweep, workload=workload or ""),
            inputs=_lengths(input_tokens, workload or "", 0),
            outputs=_lengths(output_tokens, workload or "", 1),
            shared_tokens=shared_tokens,
            long_inputs=Lengths.parse(long_tokens),
            long_every_s=long_every_s,
            speed=speed,
            length_scale=length_scale,
            max_tokens=max_tokens,
            hardware=hardware,
            precision=precision,
            ignore_eos=ignore_eos,
            keep_alive=keep_alive,
            extra_body=_object(extra_body),
            local_mesh=target.find_local_mesh(home_at(home)),
        )
        check_claims(claims, asked)
        plan = Plan(
            num_rounds=rounds,
            duration_s=duration_s,
            grace_s=grace_s,
            seed=random.SystemRandom().randrange(1 << 32) if seed is None else seed,
            objectives=Objectives.parse(goodput or ()),
        )
        with Bars(plan) as bars:
            result = asyncio.run(measure(asked, plan, bars))
        html = render(result, claims)
    except (UsageError, ValueError, InvalidResult, NotComparable, TraceError) as error:
        raise fail(str(error), 2) from error
    except ReportRefused as error:
        raise fail("refused: " + "; ".join(error.reasons), 2) from error
    except (BenchFailed, TargetError, OSError) as error:
        raise fail(str(error)) from error
    if output is not None:
        output.write_bytes(result.to_json() + b"\n")
    if report is not None:
        report.write_text(html, encoding="utf-8")
    if as_json:
        typer.echo(result.to_json())
    else:
        print_result(result, Console())
    if any(group.num_errors for point in result.points for group in point.pooled.values()):
        raise fail("some requests failed; see the remarks")


def _workload_name(workload: str | None, trace_file: Path | None) -> str:
    if workload not in WORKLOADS:
        raise UsageError(f"name a workload: {', '.join(WORKLOADS)}")
    if (workload == "trace") != (trace_file is not None):
        raise UsageError("`trace` and only `trace` takes a FILE")
    return workload


def _levels(
    concurrency: str | None, rate: str | None, *, sweep: bool, workload: str
) -> tuple[ClosedLoop | OpenLoop, ...]:
    if sum((concurrency is not None, rate is not None, sweep)) > 1:
        raise UsageError("--concurrency, --rate and --sweep exclude each other")
    if workload == "trace":
        if concurrency or rate or sweep:
            raise UsageError("a trace has its own arrivals; use --speed")
        return ()
    if rate is not None:
        if workload == "interference":
            raise UsageError("`interference` is a closed loop")
        return tuple(OpenLoop(value) for value in _numbers("rate", rate))
    if concurrency is not None:
        return tuple(ClosedLoop(int(value)) for value in _numbers("concurrency", concurrency))
    return tuple(
        ClosedLoop(value) for value in (SWEEP if sweep else (_DEFAULT_CONCURRENCY[workload],))
    )


def _numbers(name: str, text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [0.0]
    if min(values) <= 0 or (name == "concurrency" and any(value % 1 for value in values)):
        raise UsageError(f"--{name} is {text!r}, expected positive numbers as 1,2,4")
    if len(set(values)) < len(values):
        raise UsageError(f"--{name} is {text!r}: each number once")
    return values


def _lengths(text: str | None, workload: str, index: int) -> Lengths:
    return Lengths.parse(text or _DEFAULT_LENGTHS.get(workload, ("1", "1"))[index])


def _api(text: str) -> Api:
    match text:
        case "completions" | "chat":
            return text
    raise UsageError(f"--api is {text!r}, expected completions or chat")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"--extra-body is {text!r}, expected a JSON object")
    return value


def _compare(path_a: Path, path_b: Path, *, as_json: bool) -> None:
    a, b = BenchResult.read(path_a), BenchResult.read(path_b)
    differences = compare(a, b)
    if as_json:
        typer.echo(json.dumps([_as_dict(each) for each in differences], indent=2))
        return
    print_comparison(a, b, differences, Console())


def _as_dict(difference: Difference) -> dict[str, Any]:
    return {**vars(difference), "verdict": difference.verdict.value, "ratio": difference.ratio}
