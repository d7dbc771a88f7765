"""A mesh with two of everything, and what its streams answer when nothing happens."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from mesh.home import Home
from mesh.ports import find_free_ports
from tests.chaos.cells import Expected, undisturbed
from tests.chaos.probe import MeshProbe
from tests.e2e.harness import RunningMesh, pdmesh, start_mesh

# Shorter than many a stream takes: those have to move.
DRAIN_TIMEOUT_S = 1.0
SETTINGS = {
    # Every request passes through every stage, and some have to wait for the others.
    "scheduler.mode": "disaggregated",
    "scheduler.max_num_seqs": 3,
    # Prompts in several chunks: their KV moves while they are computed.
    "prefill.max_num_batched_tokens": 64,
    "prefill.kv_cache_memory_bytes": 64 << 20,
    "decode.kv_cache_memory_bytes": 64 << 20,
    "prefill.drain_timeout_s": DRAIN_TIMEOUT_S,
    "decode.drain_timeout_s": DRAIN_TIMEOUT_S,
    "kv_transfer.host_memory_bytes": 16 << 20,
    "kv_transfer.disk_bytes": 64 << 20,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The whole matrix takes half an hour: only for those who ask for nothing but this folder."""
    if all("chaos" in argument for argument in config.args):
        return
    matrix = [item for item in items if item.get_closest_marker("matrix")]
    if matrix:
        config.hook.pytest_deselected(items=matrix)
        items[:] = [item for item in items if item not in matrix]


@pytest.fixture(scope="session")
def chaos_mesh(tmp_path_factory: pytest.TempPathFactory, model_home: Path) -> Iterator[RunningMesh]:
    home = tmp_path_factory.mktemp("chaos")
    arguments = [f"--set={name}={value}" for name, value in SETTINGS.items()]
    for role in ("prefill", "decode", "gateways", "tokenizers", "schedulers", "kv-transfer"):
        arguments += [f"--{role}", "2"]
    try:
        yield start_mesh(home, model_home, *arguments, port=_two_ports())
    finally:
        pdmesh(home, "down")


@pytest.fixture
async def probe(chaos_mesh: RunningMesh) -> AsyncIterator[MeshProbe]:
    async with MeshProbe(Home(chaos_mesh.home)) as made:
        missing = await made.wait_until_whole(60)
        assert missing == {}
        yield made


@pytest.fixture(scope="session")
def expected(chaos_mesh: RunningMesh) -> Expected:
    async def ask() -> Expected:
        async with MeshProbe(Home(chaos_mesh.home)) as made:
            await made.wait_until_whole(60)
            return await undisturbed(made)

    return asyncio.run(ask())


def _two_ports() -> int:
    """The first of two that follow each other."""
    while True:
        ports = sorted(find_free_ports(8))
        for one, next_one in itertools.pairwise(ports):
            if next_one == one + 1:
                return one
