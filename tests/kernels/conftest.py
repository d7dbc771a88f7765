"""The compiled library, for every kernel test."""

import pytest

from engine.kernels.build import find_compiler
from engine.kernels.library import Library, load_library


@pytest.fixture(scope="session")
def library() -> Library:
    loaded = load_library()
    if loaded is None:
        assert find_compiler() is None, "there is a compiler, so the kernels must build"
        pytest.skip("no C++ compiler")
    return loaded
