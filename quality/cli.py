"""The gate's command line."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from engine.config import ModelError
from mesh import model_store
from mesh.cli.options import DEFAULT_HOME, HomeOption, check_writable, fail, home_at
from quality.formats import FORMAT, WEIGHTS, FormatResult, judge_all
from quality.gate import GateResult, limits_for, run_gate
from quality.settings import SettingsError, engine_config, settled

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def gate(
    model: Annotated[
        str, typer.Argument(help="An installed model, or a folder.")
    ] = model_store.DEFAULT_MODEL,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="An engine setting of the candidate, as NAME=VALUE."),
    ] = None,
    reference_settings: Annotated[
        list[str] | None,
        typer.Option(
            "--reference-set",
            help="One of the reference: float32 by torch, or with --lossless the candidate.",
        ),
    ] = None,
    reference_model: Annotated[
        Path | None, typer.Option(help="A folder, where the candidate has other weights.")
    ] = None,
    lossless: Annotated[
        bool, typer.Option(help="The candidate must make the very same tokens.")
    ] = False,
    formats: Annotated[
        str | None,
        typer.Option(help="Judge these weights with every KV format: `int4,int8`, or `all`."),
    ] = None,
    max_perplexity_increase: Annotated[
        float | None, typer.Option(min=0, help="0.01 is one percent; default: by format.")
    ] = None,
    max_kl: Annotated[float | None, typer.Option(min=0, help="Mean, nats a token.")] = None,
    min_top1: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of equal most likely tokens.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Judge a numeric configuration: six questions, and closeness to the reference.

    Exits with 0 if it passes, with 1 if it does not.
    """
    check_writable(output)
    try:
        folder = _folder(home_at(home).path, model)
        if formats is not None:
            if lossless:
                raise SettingsError("--formats compares with float32, --lossless does not")
            trusted = _reference(settings, reference_settings, lossless=False)
            chosen = _chosen(formats)
            verdicts = judge_all(model, folder, settings or [], trusted, chosen)
            results = list(_show(verdicts))
            _write_all(results, output, as_json=as_json)
            raise typer.Exit(any(each.failures for each in results))
        candidate = engine_config(folder, settings or [])
        reference = engine_config(
            reference_model or folder, _reference(settings, reference_settings, lossless=lossless)
        )
        limits = None
        if not lossless:
            limits = limits_for(settled(candidate))
            given = {
                "max_perplexity_increase": max_perplexity_increase,
                "max_mean_kl": max_kl,
                "min_top1_agreement": min_top1,
            }
            limits = replace(limits, **{k: v for k, v in given.items() if v is not None})
        with Console(stderr=True).status("running both configurations"):
            result = run_gate(model, candidate, reference, limits=limits)
    except (SettingsError, model_store.ModelStoreError, ModelError, ValueError) as error:
        raise fail(str(error), 2) from error
    text = json.dumps(result.to_dict(), indent=2, default=str)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        _print(result)
    if not result.passed:
        raise typer.Exit(1)


def _chosen(formats: str) -> tuple[str, ...]:
    chosen = tuple(WEIGHTS) if formats == "all" else tuple(formats.split(","))
    if unknown := set(chosen) - WEIGHTS.keys():
        raise SettingsError(f"--formats: {min(unknown)!r} is none of {', '.join(WEIGHTS)}")
    return chosen


def _show(results: Iterator[FormatResult]) -> Iterator[FormatResult]:
    """Tell each verdict when it is there: all of them take minutes."""
    out = Console(stderr=True)
    for each in results:
        verdict = "; ".join(each.failures) or "passed"
        out.print(f"{' '.join(_cells(each))}: {verdict}", markup=False, highlight=False)
        yield each


def _write_all(results: Sequence[FormatResult], output: Path | None, *, as_json: bool) -> None:
    report = {"format": FORMAT, "results": [each.to_dict() for each in results]}
    text = json.dumps(report, indent=2, default=str)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
        return
    table = Table("weights", "KV", "right", "perplexity", "by KV", "mean KL", "top-1", box=None)
    for each in results:
        table.add_row(*_cells(each))
    Console().print(table)


def _cells(each: FormatResult) -> tuple[str, ...]:
    assert each.result.quality is not None, "there are limits"
    quality = each.result.quality["all"]
    return (
        each.weights,
        each.kv_dtype,
        f"{sum(answer.is_right for answer in each.result.questions)} of 6",
        f"{quality.perplexity_increase:+.3%}",
        f"{each.kv_increase:+.3%}",
        f"{quality.mean_kl:.5f}",
        f"{quality.top1_agreement:.2%}",
    )


def _reference(
    candidate: list[str] | None, reference: list[str] | None, *, lossless: bool
) -> list[str]:
    if not lossless:
        # The plainest code there is, in the precision that the weights were made in.
        return ["dtype=float32", "backend=torch", *(reference or [])]
    if not reference:
        raise SettingsError("--lossless compares with something else: name it by --reference-set")
    return [*(candidate or []), *reference]


def _folder(home: Path, model: str) -> Path:
    folder = Path(model).expanduser()
    return folder.resolve() if folder.is_dir() else model_store.resolve(home, model)


def _print(result: GateResult) -> None:
    out = Console()
    num_right = sum(answer.is_right for answer in result.questions)
    out.print(f"questions: {num_right} of {len(result.questions)} right")
    if result.identity is not None:
        same = "identical" if not result.identity.differences else "different"
        out.print(f"tokens: {result.identity.num_tokens} compared, {same}")
    if result.quality is not None:
        table = Table(
            "text", "tokens", "perplexity", "reference", "increase", "mean KL", "top-1", box=None
        )
        for name, quality in result.quality.items():
            table.add_row(
                name,
                f"{quality.num_tokens:,}",
                f"{quality.candidate_perplexity:.4f}",
                f"{quality.reference_perplexity:.4f}",
                f"{quality.perplexity_increase:+.3%}",
                f"{quality.mean_kl:.5f}",
                f"{quality.top1_agreement:.2%}",
            )
        out.print(table)
    for failure in result.failures:
        out.print(f"- {failure}", style="red", markup=False, highlight=False)
    out.print("[green]passed[/green]" if result.passed else "[red]failed[/red]")
