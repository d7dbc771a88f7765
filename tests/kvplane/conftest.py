"""Workers with a tiny model on machines of their own, each with its transfer agent."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.kvplane.machines import Machines
from tests.tiny_llama import make_tiny_model


@pytest.fixture(scope="session")
def kvplane_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kvplane")
    make_tiny_model(folder)
    return folder


@pytest.fixture
async def machines(kvplane_folder: Path, tmp_path: Path) -> AsyncIterator[Machines]:
    async with AsyncExitStack() as stack:
        yield Machines(kvplane_folder, tmp_path, stack)


def pytest_generate_tests(metafunc: Any) -> None:
    """Every test that has a source and a destination runs on one machine and on two."""
    if "num_machines" in metafunc.fixturenames:
        metafunc.parametrize("num_machines", [1, 2])
