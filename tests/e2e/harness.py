"""Start and question a real mesh: every service its own process."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import httpx
import openai
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from mesh.home import Home, MeshState, ServiceRecord
from mesh.ports import find_free_ports
from mesh.supervisor import find_process

MODEL = "smollm2-135m-instruct"
# Without keys any will do.
_CLIENT: dict[str, Any] = {"api_key": "none", "max_retries": 0}


@dataclass(frozen=True)
class RunningMesh:
    """A mesh that `pdmesh up --detach` started."""

    home: Path
    port: int
    # From the command to the first request that it could have answered.
    ready_after_s: float

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def pdmesh(self, *arguments: str, check: bool = True) -> str:
        return pdmesh(self.home, *arguments, check=check)

    @property
    def state(self) -> MeshState:
        """What its supervisor last wrote: at once, where `status` is a command that asks all."""
        state = Home(self.home).read_state()
        assert state is not None, "the mesh runs"
        return state

    def records(self, role: str = "") -> list[ServiceRecord]:
        return [one for one in self.state.services if one.name.startswith(role)]

    def is_whole(self) -> bool:
        """Whether every process lives and was seen to serve."""
        return all(
            one.state == "running" and find_process(one) is not None for one in self.records()
        )

    def busy(self, role: str) -> list[ServiceRecord]:
        """The workers that compute something, by their own word."""
        return [
            one
            for one in self.records(role)
            if metric(one.metrics_address, "pdmesh_engine_running")
        ]

    def status(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.pdmesh("status", "--json"))
        return report

    def services(self, role: str) -> list[dict[str, Any]]:
        return [s for s in self.status()["services"] if s["name"].startswith(role)]

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **(_CLIENT | options))

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **(_CLIENT | options))


def pdmesh(home: Path, *arguments: str, check: bool = True) -> str:
    """Run the command in `home` and return what it printed."""
    result = subprocess.run(
        [sys.executable, "-m", "mesh.cli.main", *arguments],
        env={**os.environ, "PDMESH_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    if check and result.returncode != 0:
        raise AssertionError(f"pdmesh {' '.join(arguments)}: {result.stdout}{result.stderr}")
    return result.stdout


def start_mesh(
    home: Path, model_home: Path, *arguments: str, port: int | None = None
) -> RunningMesh:
    home.mkdir(exist_ok=True)
    if not (home / "models").exists():
        (home / "models").symlink_to(model_home / "models")
    port = port or find_free_ports(1)[0]
    started = time.monotonic()
    pdmesh(home, "up", "--detach", "--port", str(port), *arguments)
    return RunningMesh(home, port, time.monotonic() - started)


def metric(url: str | None, name: str) -> float:
    """The sum of a metric's series, by a service's own word."""
    text = httpx.get(f"http://{url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def metrics_addresses(mesh: RunningMesh) -> dict[str, str]:
    return {one.name: one.metrics_address for one in mesh.records() if one.metrics_address}


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps the spans it is sent."""

    spans: Queue[tuple[str, Span]] = field(default_factory=Queue)

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource_spans in request.resource_spans:
            [service] = [
                attribute.value.string_value
                for attribute in resource_spans.resource.attributes
                if attribute.key == "service.name"
            ]
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    self.spans.put((service, span))
        return trace_service_pb2.ExportTraceServiceResponse()
