"""A headless Chromium, spoken to by the WebDriver protocol."""

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from mesh.ports import find_free_ports

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
_ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    # Nothing but this machine can be reached, whatever the page asks for.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
]


class Browser:
    """One window."""

    def __init__(self, http: httpx.AsyncClient, session: str) -> None:
        self._http = http
        self._session = session

    async def open(self, url: str) -> None:
        await self._post("url", {"url": url})

    async def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function returns in the page."""
        return await self._post("execute/sync", {"script": script, "args": list(arguments)})

    async def wait_for(self, expression: str, timeout_s: float = 20) -> Any:
        """The value of an expression once it is true there."""
        script = (
            "const done = arguments[0];"
            f"(function look() {{ const value = {expression};"
            " if (value) done(value); else setTimeout(look, 20); })();"
        )
        async with asyncio.timeout(timeout_s):
            return await self._post("execute/async", {"script": script, "args": []})

    async def click(self, selector: str) -> None:
        """As a user does: in the middle of what is visible there."""
        found = await self._post("element", {"using": "css selector", "value": selector})
        [element] = found.values()
        await self._post(f"element/{element}/click", {})

    async def resize(self, width: int, height: int) -> None:
        """The size of the page itself, as on a telephone."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self._cdp("Emulation.setDeviceMetricsOverride", metrics)

    async def prefer(self, scheme: str) -> None:
        """ "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self._cdp("Emulation.setEmulatedMedia", {"features": features})

    async def console(self) -> list[str]:
        """What the page complained about."""
        entries = await self._post("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries]

    async def screenshot(self) -> bytes:
        """A PNG of what is visible."""
        response = await self._http.get(f"/session/{self._session}/screenshot")
        return base64.b64decode(response.json()["value"])

    async def _cdp(self, command: str, parameters: dict[str, Any]) -> Any:
        return await self._post("goog/cdp/execute", {"cmd": command, "params": parameters})

    async def _post(self, command: str, body: dict[str, Any]) -> Any:
        response = await self._http.post(f"/session/{self._session}/{command}", json=body)
        value = response.json()["value"]
        assert response.is_success, value
        return value


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    """Chromium with a new profile, gone when the block ends."""
    assert CHROMIUM, "make browser installs it"
    assert DRIVER, "make browser installs it"
    [port] = find_free_ports(1)
    process = await asyncio.create_subprocess_exec(
        DRIVER, f"--port={port}", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        while b"started successfully" not in await process.stdout.readline():
            assert not process.stdout.at_eof(), "chromedriver did not start"
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            options = {
                "binary": CHROMIUM,
                "args": [*_ARGUMENTS, f"--user-data-dir={profile}"],
            }
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            capabilities = {"capabilities": {"alwaysMatch": wanted}}
            made = (await http.post("/session", json=capabilities)).json()["value"]
            session = made["sessionId"]
            try:
                yield Browser(http, session)
            finally:
                await http.delete(f"/session/{session}")
    finally:
        process.terminate()
        await process.wait()
