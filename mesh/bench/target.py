"""What can be found out about an endpoint, so that a user need not say it."""

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import yaml

from mesh.bench.machine import describe_machine
from mesh.home import Home

_TIMEOUT = aiohttp.ClientTimeout(total=10)
# What a worker's settings say about numbers.
_PRECISION_SETTINGS = ("dtype", "quantization", "kv_cache_dtype")


class TargetError(Exception):
    """The endpoint cannot be measured; the message says why."""


@dataclass(frozen=True)
class LocalMesh:
    """A mesh on this machine, by what its home says."""

    url: str
    model: str
    model_path: Path | None
    precision: str | None


def find_local_mesh(home: Home) -> LocalMesh | None:
    """The mesh that runs in this home; None if there is none."""
    state = home.read_state()
    if state is None:
        return None
    worker: Mapping[str, Any] = {}
    if home.topology_file.exists():
        topology = yaml.safe_load(home.topology_file.read_text(encoding="utf-8"))
        worker = topology.get("decode") or {}
    model_path = Path(worker["model_path"]) if "model_path" in worker else None
    precision = None if model_path is None else _precision(worker, model_path)
    return LocalMesh(state.url, state.model, model_path, precision)


async def served_model(url: str, api_key: str | None) -> str:
    """The only model that an endpoint serves.

    Raises:
        TargetError: it cannot be reached, or serves several or none.
    """
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    address = f"{url.rstrip('/')}/v1/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as session,
            session.get(address, headers=headers) as response,
        ):
            response.raise_for_status()
            listed = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise TargetError(f"{address}: {error or type(error).__name__}") from error
    names = [model["id"] for model in listed["data"]]
    if len(names) != 1:
        raise TargetError(f"{url} serves {', '.join(names) or 'no model'}: name one with --model")
    return str(names[0])


def hardware_of(url: str) -> str | None:
    """This machine in words, if the endpoint is on it; None if nobody here can know."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return describe_machine()
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = False
    return describe_machine() if is_here else None


def _precision(worker: Mapping[str, Any], model_path: Path) -> str:
    named = {name: worker[name] for name in _PRECISION_SETTINGS if worker.get(name)}
    named.setdefault("dtype", "auto")
    text = ", ".join(f"{name} {value}" for name, value in named.items())
    config = model_path / "config.json"
    if not config.exists():
        return text
    values = json.loads(config.read_text(encoding="utf-8"))
    stored = values.get("dtype") or values.get("torch_dtype")
    return f"{text} (checkpoint {stored})" if stored else text
