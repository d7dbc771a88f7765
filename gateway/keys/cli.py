"""`pdmesh key add | list | revoke | group`: API keys without a gateway."""

import asyncio
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from redis.exceptions import RedisError
from rich import box
from rich.console import Console
from rich.table import Table

from gateway.keys.model import DEFAULT_GROUP, ApiKey, KeyBook, KeyBookError, KeyGroup, Limits
from gateway.keys.stores import Change, FileStore, RedisStore
from mesh.redis_client import connect_redis

app = typer.Typer(
    help="Make, list and revoke API keys. Gateways take a change over within seconds.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

KEYS_FILE = "keys.json"

HomeOption = Annotated[
    Path, typer.Option("--home", envvar="PDMESH_HOME", help="The folder with keys.json.")
]
FileOption = Annotated[
    Path | None, typer.Option("--file", help="Another file: the gateway's keys_path.")
]
RedisOption = Annotated[
    str | None,
    typer.Option("--redis", metavar="URL", help="Keys in Redis: for gateways with keys_in_redis."),
]
RequestsOption = Annotated[
    int | None, typer.Option("--rpm", min=0, help="Requests per minute; 0 for no limit.")
]
TokensOption = Annotated[
    int | None,
    typer.Option("--tpm", min=0, help="Tokens per minute, prompts and answers; 0 for no limit."),
]
ConcurrencyOption = Annotated[
    int | None, typer.Option("--concurrency", min=0, help="Requests at a time; 0 for no limit.")
]
_HOME = Path("~/.pdmesh")
_LIFETIME = re.compile(r"(\d+)([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="What logs and rules call the key.")],
    group: Annotated[
        str, typer.Option("--group", help="Keys with common limits, models and rules.")
    ] = DEFAULT_GROUP,
    admin: Annotated[
        bool, typer.Option("--admin", help="May also see the dashboard and /metrics.")
    ] = False,
    expires_in: Annotated[
        str | None,
        typer.Option("--expires-in", metavar="TIME", help="30m, 12h, 90d, 52w; else never."),
    ] = None,
    rpm: RequestsOption = None,
    tpm: TokensOption = None,
    concurrency: ConcurrencyOption = None,
    home: HomeOption = _HOME,
    file: FileOption = None,
    redis: RedisOption = None,
) -> None:
    """Make a key and show it, this once: only a digest of it is kept."""
    secrets: list[str] = []
    lifetime = None if expires_in is None else _lifetime(expires_in)

    def change(book: KeyBook) -> KeyBook:
        limits = _changed(Limits(), rpm, tpm, concurrency)
        changed, secret = book.with_key(
            name, group, is_admin=admin, limits=limits, lifetime=lifetime
        )
        secrets[:] = [secret]
        return changed

    store = _store(home, file, redis)
    is_first = not store.read().keys
    store.change(change)
    # Alone on stdout, for scripts.
    typer.echo(secrets[0])
    typer.echo(f"This is the only time that the key {name!r} is shown.", err=True)
    if is_first and redis is None:
        typer.echo("It is the first one: from now on the gateway wants keys.", err=True)


@app.command("list")
def list_keys(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = _HOME,
    file: FileOption = None,
    redis: RedisOption = None,
) -> None:
    """Show all keys, without their secrets, and what groups may do."""
    book = _store(home, file, redis).read()
    if as_json:
        typer.echo(json.dumps(_described(book), indent=2))
        return
    keys = _table("name", "group", "id", "admin", "limits", "created", "ends")
    for key in book.keys:
        keys.add_row(
            key.name,
            key.group,
            key.id,
            "yes" if key.is_admin else "",
            _words(key.limits),
            f"{key.created_at:%Y-%m-%d}",
            _end(key),
        )
    groups = _table("group", "limits", "models")
    for name, group in sorted(book.groups.items()):
        groups.add_row(name, _words(group.limits), ", ".join(group.models or ("all",)))
    console = Console()
    console.print(keys)
    if book.groups:
        console.print(groups)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME|ID", help="As `pdmesh key list` shows it.")],
    home: HomeOption = _HOME,
    file: FileOption = None,
    redis: RedisOption = None,
) -> None:
    """End a key: no gateway takes it after a few seconds."""
    _store(home, file, redis).change(lambda book: book.without_key(name))
    typer.echo(f"{name} is revoked")


@app.command()
def group(
    name: Annotated[str, typer.Argument(help="The group's name.")],
    rpm: RequestsOption = None,
    tpm: TokensOption = None,
    concurrency: ConcurrencyOption = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="A model that the group may use, or a glob; repeatable."),
    ] = None,
    all_models: Annotated[
        bool, typer.Option("--all-models", help="The group may use every model.")
    ] = False,
    home: HomeOption = _HOME,
    file: FileOption = None,
    redis: RedisOption = None,
) -> None:
    """Say what the keys of a group share; what is not said stays as it is."""

    def change(book: KeyBook) -> KeyBook:
        before = book.groups.get(name, KeyGroup())
        models = None if all_models else tuple(model) if model else before.models
        limits = _changed(before.limits, rpm, tpm, concurrency)
        return book.with_group(name, KeyGroup(limits=limits, models=models))

    store = _store(home, file, redis)
    if redis is None and not store.read().keys:
        # A file without keys would lock everybody out.
        raise _fail("there are no keys yet: make one first with `pdmesh key add`")
    store.change(change)
    after = store.read().groups[name]
    typer.echo(f"{name}: {_words(after.limits)}; models: {', '.join(after.models or ('all',))}")


class _Store:
    """A file or Redis, for a command: what goes wrong ends it with a sentence."""

    def __init__(self, file: Path | None, redis: str | None) -> None:
        self._file = file
        self._redis = redis

    def read(self) -> KeyBook:
        try:
            if self._redis is not None:
                return asyncio.run(_in_redis(self._redis, None))
            assert self._file is not None, "there is one or the other"
            return FileStore(self._file).read_now()
        except (KeyBookError, OSError, RedisError) as error:
            raise _fail(str(error)) from error

    def change(self, change: Change) -> None:
        try:
            if self._redis is not None:
                asyncio.run(_in_redis(self._redis, change))
            else:
                assert self._file is not None, "there is one or the other"
                FileStore(self._file).change(change)
        except ValidationError as error:
            raise _fail("; ".join(one["msg"] for one in error.errors())) from None
        except (KeyBookError, OSError, RedisError) as error:
            raise _fail(str(error)) from error


def _store(home: Path, file: Path | None, redis: str | None) -> _Store:
    if redis is not None and file is not None:
        raise _fail("--file and --redis are two places: give one")
    return _Store(file or home.expanduser() / KEYS_FILE, redis)


async def _in_redis(url: str, change: Change | None) -> KeyBook:
    try:
        redis = connect_redis(url)
    except ValueError as error:
        raise KeyBookError(f"{url.partition('//')[0]}//… is no address of Redis") from error
    try:
        store = RedisStore(redis)
        if change is not None:
            await store.change(change)
        return await store.read()
    finally:
        await redis.aclose()


def _changed(limits: Limits, rpm: int | None, tpm: int | None, concurrency: int | None) -> Limits:
    given = {
        "requests_per_minute": rpm,
        "tokens_per_minute": tpm,
        "max_concurrency": concurrency,
    }
    said = {name: value or None for name, value in given.items() if value is not None}
    return Limits(**{**limits.model_dump(), **said})


def _lifetime(text: str) -> timedelta:
    found = _LIFETIME.fullmatch(text.strip())
    if found is None or not int(found[1]):
        raise _fail(f"--expires-in is a time like 12h or 90d, not {text!r}")
    try:
        lifetime = timedelta(**{_UNITS[found[2]]: int(found[1])})
        datetime.now(UTC) + lifetime
    except OverflowError:
        raise _fail(f"--expires-in {text} is beyond all calendars") from None
    return lifetime


def _end(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"{key.revoked_at:%Y-%m-%d} (revoked)"
    return f"{key.expires_at:%Y-%m-%d %H:%M}" if key.expires_at is not None else ""


def _words(limits: Limits) -> str:
    parts = [
        f"{value} {unit}"
        for value, unit in (
            (limits.requests_per_minute, "rpm"),
            (limits.tokens_per_minute, "tpm"),
            (limits.max_concurrency, "at a time"),
        )
        if value is not None
    ]
    return ", ".join(parts) or "none"


def _described(book: KeyBook) -> dict[str, Any]:
    """For machines: everything but digests."""
    described = book.model_dump(mode="json", exclude={"version"})
    for key in described["keys"]:
        del key["sha256"]
    return described


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _fail(message: str) -> typer.Exit:
    typer.echo(f"pdmesh key: {message}", err=True)
    return typer.Exit(1)
