"""The mesh that the tests of this folder share."""

from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from tests.e2e.harness import Collector, RunningMesh, pdmesh, start_mesh


@pytest.fixture(scope="session")
def collector() -> Iterator[tuple[Collector, str]]:
    """The collector and its address."""
    servicer = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(grace=None).wait()


@pytest.fixture(scope="session")
def mesh(
    tmp_path_factory: pytest.TempPathFactory,
    model_home: Path,
    collector: tuple[Collector, str],
) -> Iterator[RunningMesh]:
    """One prefill worker and two decode workers, traced; every request sees both kinds."""
    home = tmp_path_factory.mktemp("mesh")
    running = start_mesh(
        home,
        model_home,
        *("--decode", "2"),
        *("--set", "scheduler.mode=disaggregated"),
        # Short, so that a long stream has to move when its worker is drained.
        *("--set", "decode.drain_timeout_s=1"),
        # Small, so that it is full before a test looks at memory.
        *("--set", "kv_transfer.host_memory_bytes=16777216"),
        *("--otlp-endpoint", collector[1]),
    )
    yield running
    pdmesh(home, "down")


@pytest.fixture
def client(mesh: RunningMesh) -> Iterator[openai.OpenAI]:
    with mesh.client(timeout=60) as made:
        yield made


@pytest.fixture
async def async_client(mesh: RunningMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with mesh.async_client(timeout=60) as made:
        yield made
