"""What commands read of a running gateway's dashboard."""

import json
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

import typer

from mesh.cli.options import fail, home_at

_TIMEOUT_S = 5.0
_NOT_FOUND = 404

UrlOption = Annotated[
    str | None,
    typer.Option("--url", help="A gateway; by default the one that runs in this home."),
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--key",
        envvar="PDMESH_DASHBOARD_KEY",
        help="The gateway's dashboard_key, or an admin API key.",
    ),
]


class GatewayApi:
    """JSON under /dashboard/api; what goes wrong ends the command with a sentence."""

    def __init__(self, home: Path, url: str | None, key: str | None) -> None:
        if url is None:
            state = home_at(home).read_state()
            if state is None:
                raise fail("nothing runs here; start it with `pdmesh up`, or give --url")
            # What listens everywhere is reached here by this name.
            url = state.url.replace("//0.0.0.0:", "//127.0.0.1:")
        elif not url.startswith(("http://", "https://")):
            raise fail(f"--url is {url!r}, expected http://… or https://…", 2)
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def live(self) -> dict[str, Any]:
        """The mesh now."""
        found = self._get("live")
        if found is None:
            raise fail(f"{self.url} has no dashboard")
        return found

    def prefixes(self) -> list[dict[str, Any]]:
        """Where the prompts of each key stop sharing a prefix."""
        found = self._get("prefixes")
        return [] if found is None else list(found["prefixes"])

    def request(self, request_id: str) -> dict[str, Any] | None:
        """One of the last requests; None if it is not known there."""
        return self._get(f"requests/{urllib.parse.quote(request_id, safe='')}")

    def _get(self, path: str) -> dict[str, Any] | None:
        request = urllib.request.Request(f"{self.url}/dashboard/api/{path}", headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                found: dict[str, Any] = json.load(response)
                return found
        except urllib.error.HTTPError as error:
            with error:
                if error.code == _NOT_FOUND:
                    return None
                raise fail(f"{self.url}: {_message(error.read())}") from error
        except (OSError, ValueError, HTTPException) as error:
            raise fail(f"{self.url} does not answer: {error}") from error


def find_request(home: Path, api: GatewayApi, request_id: str) -> dict[str, Any]:
    """A request that the gateway remembers, or that its log in this home has."""
    found = api.request(request_id) or _from_log(home_at(home).logs, request_id)
    if found is None:
        raise fail(f"request {request_id} is not among those that {api.url} remembers")
    return found


def _from_log(logs: Path, request_id: str) -> dict[str, Any] | None:
    for path in logs.glob("gateway-*.log"):
        for text in reversed(path.read_text(errors="replace").splitlines()):
            if request_id not in text or '"stages_ms"' not in text:
                continue
            line: dict[str, Any] = json.loads(text)
            if request_id in (line["request_id"], line.get("client_request_id")):
                stages = [{"name": name, "ms": ms} for name, ms in line["stages_ms"].items()]
                return {**line, "stages": stages}
    return None


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
