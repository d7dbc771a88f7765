"""Fixtures for all tests: the default model, downloaded once per machine."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from mesh import model_store

# As in a mesh (mesh/launch.py), and before any module loads torch: threads of torch that wait for
# each other by spinning take the cores from those they wait for, where tests run side by side.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# As in `pdmesh up`, and before a channel is opened: gRPC's fork handlers lock up a child that is
# forked, on its way to another program, while a channel of an earlier test lives.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


# A machine that stands still for a moment says nothing of the test that it happens to.
settings.register_profile("pdmesh", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pdmesh")


@pytest.fixture(scope="session")
def model_home() -> Path:
    """A pdmesh home in which the default model is installed."""
    home = Path(os.environ.get("PDMESH_HOME", "~/.pdmesh")).expanduser()
    model_store.ensure(home, model_store.DEFAULT_MODEL)
    return home


@pytest.fixture(scope="session")
def smollm2_path(model_home: Path) -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    return model_store.resolve(model_home, model_store.DEFAULT_MODEL)
