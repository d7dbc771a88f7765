"""`pdmesh bench`: load an OpenAI endpoint, and report what holds up."""

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from mesh.bench import arguments, target
from mesh.bench.command import Asked, UsageError, check_claims, measure
from mesh.bench.compare import Difference, NotComparable, compare
from mesh.bench.honesty import Claim
from mesh.bench.prompts import Lengths
from mesh.bench.report import ReportRefused, render
from mesh.bench.results import BenchResult, InvalidResult, Objectives
from mesh.bench.run import BenchFailed, Plan
from mesh.bench.target import TargetError
from mesh.bench.terminal import Bars, print_comparison, print_result
from mesh.bench.workloads import TraceError
from mesh.cli.bench_options import (
    ApiKeyOption,
    ApiOption,
    AsJsonOption,
    ClaimOption,
    CompareFilesOption,
    ConcurrencyOption,
    DurationSOption,
    ExtraBodyOption,
    GoodputOption,
    GraceSOption,
    HardwareOption,
    IgnoreEosOption,
    InputTokensOption,
    KeepAliveOption,
    LengthScaleOption,
    LongEverySOption,
    LongTokensOption,
    MaxTokensOption,
    ModelOption,
    OutputOption,
    OutputTokensOption,
    PrecisionOption,
    RateOption,
    RenderFileOption,
    ReportOption,
    RoundsOption,
    SeedOption,
    SharedTokensOption,
    SpeedOption,
    SweepOption,
    TokenizerOption,
    TraceFileArgument,
    UrlOption,
    WorkloadArgument,
)
from mesh.cli.options import DEFAULT_HOME, HomeOption, check_writable, fail, home_at, output_console


def bench(
    workload: WorkloadArgument = None,
    trace_file: TraceFileArgument = None,
    url: UrlOption = None,
    model: ModelOption = None,
    api: ApiOption = "completions",
    api_key: ApiKeyOption = None,
    tokenizer: TokenizerOption = None,
    concurrency: ConcurrencyOption = None,
    sweep: SweepOption = False,
    rate: RateOption = None,
    input_tokens: InputTokensOption = None,
    output_tokens: OutputTokensOption = None,
    shared_tokens: SharedTokensOption = 1500,
    long_tokens: LongTokensOption = "4000",
    long_every_s: LongEverySOption = 5.0,
    speed: SpeedOption = 1.0,
    length_scale: LengthScaleOption = 1.0,
    max_tokens: MaxTokensOption = None,
    rounds: RoundsOption = 5,
    duration_s: DurationSOption = 20.0,
    grace_s: GraceSOption = 30.0,
    goodput: GoodputOption = None,
    claim: ClaimOption = None,
    hardware: HardwareOption = None,
    precision: PrecisionOption = None,
    ignore_eos: IgnoreEosOption = True,
    keep_alive: KeepAliveOption = False,
    extra_body: ExtraBodyOption = "{}",
    seed: SeedOption = None,
    output: OutputOption = None,
    report: ReportOption = None,
    render_file: RenderFileOption = None,
    compare_files: CompareFilesOption = None,
    as_json: AsJsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Measure an OpenAI endpoint: TTFT, TPOT, ITL, end to end, goodput, and the knee."""
    claims = tuple(claim or ())
    with _exit_statuses():
        if compare_files is not None:
            _compare(*compare_files, as_json=as_json)
            return
        if render_file is not None:
            _render(render_file, report, claims)
            return
        name = arguments.workload_name(workload, trace_file)
        asked = Asked(
            workload=name,
            trace_file=trace_file,
            url=url,
            model=model,
            api=arguments.api_name(api),
            api_key=api_key,
            tokenizer=tokenizer,
            levels=arguments.levels(concurrency, rate, sweep=sweep, workload=name),
            inputs=arguments.input_lengths(input_tokens, name),
            outputs=arguments.output_lengths(output_tokens, name),
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
            extra_body=arguments.json_object(extra_body),
            local_mesh=target.find_local_mesh(home_at(home)),
        )
        plan = Plan(
            num_rounds=rounds,
            duration_s=duration_s,
            grace_s=grace_s,
            seed=random.SystemRandom().randrange(1 << 32) if seed is None else seed,
            objectives=Objectives.parse(goodput or ()),
        )
        result = _measure(asked, plan, claims, output, report)
    _show(result, as_json=as_json)


@contextmanager
def _exit_statuses() -> Iterator[None]:
    """2 for what makes no sense or cannot be claimed, 1 for what went wrong."""
    try:
        yield
    except (UsageError, ValueError, InvalidResult, NotComparable, TraceError) as error:
        raise fail(str(error), 2) from error
    except ReportRefused as error:
        raise fail("refused: " + "; ".join(error.reasons), 2) from error
    except (BenchFailed, TargetError, OSError) as error:
        raise fail(str(error)) from error


def _measure(
    asked: Asked,
    plan: Plan,
    claims: tuple[Claim, ...],
    output: Path | None,
    report: Path | None,
) -> BenchResult:
    """Run, and write what there is to be kept."""
    check_claims(claims, asked)
    check_writable(output, report)
    with Bars(plan) as bars:
        result = asyncio.run(measure(asked, plan, bars))
    html = render(result, claims)
    if output is not None:
        output.write_bytes(result.to_json() + b"\n")
    if report is not None:
        report.write_text(html, encoding="utf-8")
    return result


def _show(result: BenchResult, *, as_json: bool) -> None:
    if as_json:
        typer.echo(result.to_json())
    else:
        print_result(result, output_console())
    if any(group.num_errors for point in result.points for group in point.pooled.values()):
        raise fail("some requests failed; see the remarks")


def _render(path: Path, report: Path | None, claims: tuple[Claim, ...]) -> None:
    if report is None:
        raise UsageError("--render needs --report FILE")
    report.write_text(render(BenchResult.read(path), claims), encoding="utf-8")


def _compare(path_a: Path, path_b: Path, *, as_json: bool) -> None:
    a, b = BenchResult.read(path_a), BenchResult.read(path_b)
    differences = compare(a, b)
    if as_json:
        typer.echo(json.dumps([_as_dict(each) for each in differences], indent=2))
        return
    print_comparison(a, b, differences, output_console())


def _as_dict(difference: Difference) -> dict[str, Any]:
    return {**vars(difference), "verdict": difference.verdict.value, "ratio": difference.ratio}
