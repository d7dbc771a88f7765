"""`pdmesh trace`: where one request's time went."""

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from mesh.cli.gateway_api import GatewayApi, KeyOption, UrlOption, find_request
from mesh.cli.options import DEFAULT_HOME, HomeOption, output_console

_BAR_CELLS = 40


def trace(
    request_id: Annotated[str, typer.Argument(help="From x-request-id, the mesh's or your own.")],
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the stages of a finished request; together they are all of its time."""
    request = find_request(home, GatewayApi(home, url, key), request_id)
    if as_json:
        typer.echo(json.dumps(request, indent=2))
        return
    output_console().print(waterfall(request))


def waterfall(request: dict[str, Any]) -> Table:
    """The stages as a table with bars."""
    total_ms = request["total_ms"]
    table = Table(
        title=f"{request['request_id']}  {_headline(request)}", box=None, title_justify="left"
    )
    table.add_column("stage")
    table.add_column("ms", justify="right")
    table.add_column("%", justify="right")
    table.add_column("")
    for name, pieces in _lanes(request).items():
        duration_ms = request["stages_ms"][name]
        share = duration_ms / total_ms if total_ms else 0.0
        bar = _bar(pieces, total_ms)
        table.add_row(name.replace("_", " "), f"{duration_ms:.1f}", f"{share:.1%}", bar)
    table.add_row("total", f"{total_ms:.1f}", "", "")
    return table


def _lanes(request: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Start and duration of each stage's pieces; a log line has no more than the sums."""
    lanes: dict[str, list[tuple[float, float]]] = {}
    start_ms = 0.0
    for piece in request.get("segments") or request["stages"]:
        start_ms = piece.get("start_ms", start_ms)
        lanes.setdefault(piece["name"], []).append((start_ms, piece["ms"]))
        start_ms += piece["ms"]
    return lanes


def _bar(pieces: list[tuple[float, float]], total_ms: float) -> str:
    cells = [" "] * _BAR_CELLS
    for start_ms, duration_ms in pieces:
        first = min(int(_BAR_CELLS * start_ms / (total_ms or 1)), _BAR_CELLS - 1)
        for cell in range(first, first + max(1, round(_BAR_CELLS * duration_ms / (total_ms or 1)))):
            if cell < _BAR_CELLS:
                cells[cell] = "█"
    return "".join(cells)


def _headline(request: dict[str, Any]) -> str:
    parts = [
        request.get("error") or str(request["status"]),
        f"{request['prompt_tokens']} + {request['completion_tokens']} tokens",
    ]
    if request.get("ttft_ms") is not None:
        parts.append(f"TTFT {request['ttft_ms']:.0f} ms")
    if request.get("tpot_ms") is not None:
        parts.append(f"TPOT {request['tpot_ms']:.1f} ms")
    workers = [request.get("prefill_worker_id"), request.get("decode_worker_id")]
    parts.append(" → ".join(worker for worker in workers if worker))
    return ", ".join(part for part in parts if part)
