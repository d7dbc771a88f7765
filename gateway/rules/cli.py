"""`pdmesh rules check | explain | compile`: a rules file without a gateway."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.body import parse_object
from gateway.rules.condition_reader import ROUTES
from gateway.rules.document import Document, encode_string
from gateway.rules.engine import Outcome, RuleRequest, actions_header, apply
from gateway.rules.loader import RulesInvalid, load
from gateway.rules.lua import compile_to_lua, matches_on_keys
from gateway.rules.model import RuleSet
from gateway.rules.scanner import find_problem
from mesh.errors import InvalidRequest

app = typer.Typer(
    help="Check, explain and compile parameter rules.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The rules file (YAML).")]


@app.command()
def check(file: FileArgument) -> None:
    """Say whether the file is valid; all its problems, with their lines."""
    rules = _load(file)
    typer.echo(f"{file}: {len(rules.rules)} rules, no problems")


@app.command()
def explain(
    file: FileArgument,
    body: Annotated[
        Path, typer.Option("--body", help="The client's body (JSON); - is standard input.")
    ],
    model: Annotated[
        str | None, typer.Option("--model", help="Use this model instead of the body's.")
    ] = None,
    route: Annotated[
        str, typer.Option("--route", help=f"A path, or one of {', '.join(ROUTES)}.")
    ] = "chat",
    header: Annotated[
        list[str] | None, typer.Option("--header", help="NAME: VALUE; may be repeated.")
    ] = None,
    key: Annotated[str, typer.Option("--key", help="The name of the caller's API key.")] = "",
    key_group: Annotated[str, typer.Option("--key-group", help="The group of that key.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what the rules make of a request."""
    rules = _load(file)
    raw = _read(body)
    payload = _parse(raw)
    if model is not None:
        raw = _with_model(raw, model)
        payload = _parse(raw)
    request = RuleRequest(
        body=raw,
        payload=payload,
        route=ROUTES.get(route, route),
        headers=[_header(one) for one in header or ()],
        key=key,
        key_group=key_group,
    )
    outcome = apply(rules, request)
    if as_json:
        typer.echo(json.dumps(_as_json(outcome), ensure_ascii=False, indent=2))
    else:
        _print(outcome)


@app.command("compile")
def compile_(
    file: FileArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write; default: standard output."),
    ] = None,
) -> None:
    """Write the rules as a Lua table for deploy/openresty."""
    rules = _load(file)
    for name in matches_on_keys(rules):
        typer.echo(
            f"{file}: rule {name!r} looks at API keys: nginx knows them only from "
            "$pdmesh_key and $pdmesh_key_group (see docs/rules.md)",
            err=True,
        )
    text = compile_to_lua(rules, file.name)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text)


def _load(file: Path) -> RuleSet:
    try:
        return load(file)
    except RulesInvalid as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _read(body: Path) -> bytes:
    try:
        return typer.get_binary_stream("stdin").read() if str(body) == "-" else body.read_bytes()
    except OSError as error:
        raise _fail(f"{body}: {error.strerror}") from None


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        return parse_object(raw)
    except InvalidRequest as error:
        raise _fail(f"refused with status 400: {find_problem(raw) or error}") from None


def _with_model(raw: bytes, model: str) -> bytes:
    document = Document(raw)
    member = document.root.get("model")
    if member is None:
        document.root.insert("model", encode_string(model))
    else:
        member.value = encode_string(model)
    return document.render()


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        raise typer.BadParameter(f"{text!r} is not NAME: VALUE", param_hint="--header")
    return name.strip().lower(), value.strip()


def _as_json(outcome: Outcome) -> dict[str, Any]:
    rejection = outcome.rejection
    return {
        "body": None if rejection else outcome.body.decode(),
        "actions": [
            {"kind": action.kind, "path": action.path, "rule": action.rule}
            for action in outcome.actions
        ],
        "param_actions": actions_header(outcome.actions),
        "headers": [list(header) for header in outcome.headers],
        "rejected": rejection
        and {
            "status": rejection.status,
            "message": rejection.message,
            "code": rejection.code,
            "param": rejection.param,
        },
    }


def _print(outcome: Outcome) -> None:
    if not outcome.actions:
        typer.echo("no rule did anything", err=True)
    for action in outcome.actions:
        typer.echo(f"{action.kind} {action.path} (rule {action.rule})", err=True)
    if outcome.rejection is not None:
        typer.echo(f"refused: {outcome.rejection.status} {outcome.rejection.message}", err=True)
        return
    for name, value in outcome.headers:
        typer.echo(f"{name}: {value}", err=True)
    # The forwarded bytes and nothing else on standard output.
    typer.echo(outcome.body, nl=False)


def _fail(message: str) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(1)
