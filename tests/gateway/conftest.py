"""A gateway in front of a scripted mesh, on real sockets."""

from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from tests.gateway.fakes import FakeMesh
from tests.gateway.running import RunningGateway, run_gateway


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with FakeMesh() as fake:
        yield fake


@pytest.fixture
async def gateway(mesh: FakeMesh) -> AsyncIterator[RunningGateway]:
    async with run_gateway(mesh) as running:
        yield running


@pytest.fixture
async def http(gateway: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        yield client


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=20
    ) as made:
        yield made
