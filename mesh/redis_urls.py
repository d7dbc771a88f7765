"""URLs that name several Redis servers: `redis+sentinel://` and `redis+cluster://`."""

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class SeveralServers:
    """A URL that names more than one server."""

    kind: Literal["sentinel", "cluster"]
    hosts: tuple[tuple[str, int], ...]
    has_tls: bool
    username: str | None = None
    password: str | None = None
    # Of a sentinel URL.
    service: str = ""
    db: int = 0


_SEVERAL = re.compile(r"(?P<tls>rediss?)\+(?P<kind>sentinel|cluster)://(?P<rest>.*)", re.DOTALL)
_DEFAULT_PORTS = {"sentinel": 26379, "cluster": 6379}


def parse_several(url: str) -> SeveralServers | None:
    """None for a URL of one server; ValueError for one that cannot be read."""
    match = _SEVERAL.fullmatch(url)
    if match is None:
        return None
    kind: Literal["sentinel", "cluster"] = "cluster" if match["kind"] == "cluster" else "sentinel"
    authority, _, path = match["rest"].partition("/")
    credentials, _, hosts = authority.rpartition("@")
    username, _, password = credentials.partition(":")
    service, _, db = path.strip("/").partition("/")
    if kind == "sentinel" and not service:
        raise ValueError("a sentinel URL ends with the name of the service: .../mymaster")
    if kind == "cluster" and service not in ("", "0"):
        raise ValueError("a cluster has one database, 0")
    if db and not db.isdigit():
        raise ValueError(f"no database: {db!r}")
    return SeveralServers(
        kind=kind,
        hosts=tuple(_host(host, _DEFAULT_PORTS[kind]) for host in hosts.split(",")),
        has_tls=match["tls"] == "rediss",
        username=unquote(username) or None,
        password=unquote(password) or None,
        service=unquote(service) if kind == "sentinel" else "",
        db=int(db) if db else 0,
    )


def _host(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"no host: {text!r}")
    return parts.hostname, parts.port or default_port
