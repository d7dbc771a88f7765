"""Fixtures for all tests: the default model, downloaded once per machine."""

import os
from pathlib import Path

import pytest

from mesh import model_store


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
