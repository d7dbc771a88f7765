"""A gateway in front of a scripted mesh, on real sockets; one for each module."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pytest_asyncio import is_async_test

from mesh import telemetry
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import RunningGateway, run_gateway


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the async tests of this folder on the loop that their gateway lives on."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_mesh() -> AsyncIterator[FakeMesh]:
    async with FakeMesh() as fake:
        yield fake


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(shared_mesh: FakeMesh) -> AsyncIterator[RunningGateway]:
    async with run_gateway(shared_mesh) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(gateway: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=20
    ) as made:
        yield made


@pytest.fixture
def mesh(shared_mesh: FakeMesh) -> Iterator[FakeMesh]:
    """The shared mesh without a script; nothing may be left running or held."""
    shared_mesh.reset()
    yield shared_mesh
    shared_mesh.reset()


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """The spans that end during the test."""
    exporter = InMemorySpanExporter()
    telemetry.start_tracing("gateway", SimpleSpanProcessor(exporter))
    yield exporter
    telemetry.shutdown()


class _CountedSpans(SpanProcessor):
    """How many began, and how many ended."""

    def __init__(self) -> None:
        self.num_started = self.num_ended = 0

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self.num_started += 1

    def on_end(self, span: ReadableSpan) -> None:
        self.num_ended += 1


@pytest.fixture(params=["off", "on"])
def tracing(request: pytest.FixtureRequest) -> Iterator[None]:
    """OB-03: what goes wrong is noticed alike, and every span that began has an end."""
    if request.param == "off":
        yield
        return
    counted = _CountedSpans()
    telemetry.start_tracing("gateway", counted)
    yield
    telemetry.shutdown()
    assert counted.num_started == counted.num_ended > 0
