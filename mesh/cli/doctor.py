"""`pdmesh doctor`: which stage, why likely, what to try."""

import json
from typing import Annotated

import typer
from rich.text import Text

from mesh.cli.gateway_api import GatewayApi, KeyOption, UrlOption, find_request
from mesh.cli.options import DEFAULT_HOME, HomeOption, fail, output_console
from mesh.diagnosis import Finding, diagnose_now, diagnose_prefixes, diagnose_request


def doctor(
    request_id: Annotated[
        str | None, typer.Argument(help="A finished request; or give --now.")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Look at the mesh as it is.")] = False,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what makes a request, or the mesh, slow, and what to try."""
    if now == (request_id is not None):
        raise fail("give a request's id, or --now", code=2)
    api = GatewayApi(home, url, key)
    if request_id is None:
        findings = [*diagnose_now(api.live()), *diagnose_prefixes(api.prefixes())]
    else:
        findings = diagnose_request(find_request(home, api, request_id))
    if as_json:
        typer.echo(json.dumps({"findings": [one.to_json() for one in findings]}, indent=2))
        return
    console = output_console()
    for finding in findings or [Finding("", "nothing stands out", "", "")]:
        console.print(_describe(finding))


def _describe(finding: Finding) -> Text:
    text = Text(finding.what, style="bold")
    if finding.why:
        text.append(f"\n  likely: {finding.why}\n  try:    {finding.to_try}\n", style="not bold")
    return text
