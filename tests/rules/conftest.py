"""An event loop in a thread, shared by the tests of a module."""

from collections.abc import Iterator

import pytest

from tests.rules.wire import Background


@pytest.fixture(scope="module")
def background() -> Iterator[Background]:
    running = Background()
    yield running
    running.close()
