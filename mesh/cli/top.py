"""`pdmesh top`: the mesh now, redrawn every second."""

import json
import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mesh.cli.gateway_api import GatewayApi, KeyOption, UrlOption
from mesh.cli.options import DEFAULT_HOME, HomeOption

_NONE = "-"


def top(
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    key: KeyOption = None,
    interval_s: Annotated[float, typer.Option("--interval", min=0.2, help="Seconds.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show latencies, throughput and workers of a running mesh until Ctrl-C."""
    api = GatewayApi(home, url, key)
    if as_json:
        typer.echo(json.dumps(api.live(), indent=2))
        return
    console = Console()
    if once:
        console.print(screen(api.url, api.live()))
        return
    with Live(screen(api.url, api.live()), console=console, screen=True) as display:
        try:
            while True:
                time.sleep(interval_s)
                display.update(screen(api.url, api.live()))
        except KeyboardInterrupt:
            return


def screen(url: str, live: dict[str, Any]) -> Group:
    """Everything at a glance."""
    problems = "; ".join(live["problems"]) or "all well"
    style = "red" if live["problems"] else "green"
    tokens = live["series"]["tokens"][-6:-1]
    facts = (
        f"{live['streams']} streams, {live['queued']} queued, "
        f"{sum(tokens) / max(len(tokens), 1):.1f} tokens/s, "
        f"{live['num_requests']} requests and {live['num_failed']} failures in the last minute, "
        f"cache hit rate {_percent(live['cache_hit_rate'])}"
    )
    return Group(
        Text.assemble((url, "bold"), "  ", (problems, style)),
        Text(facts),
        Text(),
        _latencies(live),
        Text(),
        _workers(live["workers"]),
        Text(),
        _stages(live["mean_stages_ms"]),
    )


def _latencies(live: dict[str, Any]) -> Table:
    table = Table(box=None)
    for heading in ("", "p50", "p90", "p99"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, title in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("total_ms", "total")):
        spread = live[name] or {}
        table.add_row(title, *(_ms(spread.get(one)) for one in ("p50", "p90", "p99")))
    return table


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = Table(box=None)
    table.add_column("worker")
    for heading in ("running", "waiting", "batch", "KV use", "hit rate", "TPOT p50", "tokens/s"):
        table.add_column(heading, justify="right")
    table.add_column("leases", justify="right")
    for worker in workers:
        batch, tpot = worker["batch_size"] or {}, worker["tpot_ms"] or {}
        table.add_row(
            worker["worker_id"],
            str(worker["running"]),
            str(worker["waiting"]),
            f"{batch['p50']:.1f}" if batch else _NONE,
            _percent(worker["kv_cache_usage"]),
            _percent(worker["prefix_cache_hit_rate"]),
            _ms(tpot.get("p50")),
            _NONE if worker["tokens_per_s"] is None else f"{worker['tokens_per_s']:.1f}",
            str(worker["leases"]),
        )
    return table


def _stages(stages_ms: dict[str, float]) -> Table:
    table = Table(box=None)
    table.add_column("mean stage")
    table.add_column("ms", justify="right")
    table.add_column("")
    longest = max(stages_ms.values(), default=0.0)
    for name, duration_ms in sorted(stages_ms.items(), key=lambda item: -item[1]):
        bar = "█" * round(30 * duration_ms / longest) if longest else ""
        table.add_row(name.replace("_", " "), f"{duration_ms:.1f}", bar)
    return table


def _ms(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1f} ms"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"
