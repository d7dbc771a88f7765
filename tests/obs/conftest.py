"""One browser for the tests of a module."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.obs.browser import CHROMIUM, DRIVER, Browser, browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def window(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    assert CHROMIUM, "install Chromium: make browser"
    assert DRIVER, "install Chromium's driver: make browser"
    async with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def page(window: Browser) -> AsyncIterator[Browser]:
    """The module's browser as it is when it starts; what it complained about is forgotten."""
    await window.resize(1280, 900)
    await window.prefer("light")
    await window.console()
    yield window
    # Nothing goes on in the page of a test that is over.
    await window.open("about:blank")
