"""The page in a real browser, without a network."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import httpx
import pytest
import pytest_asyncio

from tests.gateway.fakes import FakeMesh
from tests.gateway.running import RunningGateway, chat, run_gateway
from tests.obs.browser import Browser

CHAT = "/v1/chat/completions"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def gateway() -> AsyncIterator[RunningGateway]:
    async with FakeMesh() as mesh, run_gateway(mesh) as running:
        yield running


async def ask(gateway: RunningGateway, times: int = 1) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for number in range(times):
            headers = {"x-request-id": f"request-{number}"}
            await client.post(CHAT, json=chat(f"secret {number}"), headers=headers)
        await client.post(CHAT, json=chat(temperature=9))


async def test_requests_appear_while_one_looks_and_open_into_their_stages(
    gateway: RunningGateway, page: Browser
) -> None:
    await page.open(f"{gateway.url}/dashboard")
    await page.wait_for("document.querySelector('#status').textContent.includes('all well')")
    await ask(gateway, times=3)
    await page.wait_for("document.querySelectorAll('tr.request').length === 4")

    await page.click("tr.request:nth-child(2) button")
    await page.wait_for("document.querySelector('.waterfall')")

    names = await page.run(
        "return [...document.querySelectorAll('.waterfall > span:nth-child(3n + 1)')]"
        ".map((one) => one.textContent)"
    )
    assert {"rules", "tokenize", "queue", "prefill compute", "decode steps", "write"} <= set(names)
    lanes = await page.run(
        "return [...document.querySelectorAll('.waterfall .lane')].map((lane) =>"
        " [...lane.children].map((one) => [parseFloat(one.style.left), parseFloat(one.style.width)]"
        "))"
    )
    # The request goes from lane to lane, and is in one of them all the time.
    assert [lane[0][0] for lane in lanes] == sorted(lane[0][0] for lane in lanes)
    assert sum(width for lane in lanes for _, width in lane) == pytest.approx(100, abs=0.5)
    pieces = sorted(piece for lane in lanes for piece in lane)
    for (left, width), (next_left, _) in pairwise(pieces):
        assert left + width == pytest.approx(next_left, abs=0.1)
    expanded = "tr.request:nth-child(2) button"
    assert await page.run(f"return document.querySelector('{expanded}').ariaExpanded") == "true"
    await page.click(expanded)
    await page.wait_for("!document.querySelector('.waterfall')")
    assert "secret" not in await page.run("return document.body.textContent")
    assert [line for line in await page.console() if "favicon" not in line] == []


async def test_failures_can_be_filtered_and_requests_found_by_the_clients_id(
    gateway: RunningGateway, page: Browser
) -> None:
    await ask(gateway, times=2)
    await page.open(f"{gateway.url}/dashboard")
    await page.wait_for("document.querySelectorAll('tr.request').length === 3")

    change = "const it = document.getElementById(arguments[0]); it.value = arguments[1];"
    change += "it.dispatchEvent(new Event('input'))"
    await page.run(change, "filter", "failed")
    failed = await page.run("return document.querySelector('tr.request').textContent")
    await page.run(change, "filter", "all")
    await page.run(change, "find", "request-1")

    assert "INVALID_REQUEST" in failed
    assert await page.run("return document.querySelectorAll('tr.request').length") == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_fits_a_narrow_window_and_is_readable_in_either_scheme(
    gateway: RunningGateway, page: Browser, scheme: str
) -> None:
    await page.resize(360, 740)
    await page.prefer(scheme)
    await ask(gateway)
    await page.open(f"{gateway.url}/dashboard")
    await page.wait_for("document.querySelectorAll('tr.request').length === 2")
    await page.click("tr.request:nth-child(2) button")
    await page.wait_for("document.querySelector('.waterfall')")

    assert await page.run("return document.documentElement.scrollWidth") <= 360
    right = "return document.querySelector('.waterfall').getBoundingClientRect().right"
    assert await page.run(right) <= 360
    colors = await page.run(
        "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
    )
    ground, ink = [sum(map(int, color[4:-1].split(","))) for color in colors]
    assert (ground > ink) == (scheme == "light")
    assert abs(ground - ink) > 400


async def test_the_page_is_there_within_a_second(gateway: RunningGateway, page: Browser) -> None:
    await ask(gateway)

    async def loaded_ms() -> float:
        await page.open(f"{gateway.url}/dashboard")
        await page.wait_for("document.querySelectorAll('tr.request').length === 2")
        loaded = await page.run(
            "return performance.getEntriesByType('navigation')[0].loadEventEnd;"
        )
        assert isinstance(loaded, float | int)
        return loaded

    # The quickest of some: others share the machine.
    assert 0 < min([await loaded_ms() for _ in range(3)]) < 1000


async def test_the_page_follows_sixteen_streams_while_they_run(page: Browser) -> None:
    async with FakeMesh() as mesh, run_gateway(mesh) as gateway:
        mesh.model.default = [*b"x" * 400]
        paced = asyncio.Semaphore(0)
        for decode in mesh.decodes:
            decode.steps = paced
        await page.open(f"{gateway.url}/dashboard")
        await page.wait_for("document.querySelector('#status').textContent.includes('all well')")
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            body = chat(stream=True, max_tokens=200)
            streams = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(16)]
            await page.wait_for(shows("streams", "=== 16"))
            for _ in range(16 * 40):
                paced.release()
            # The mean of five seconds, the running one left out.
            await page.wait_for(shows("tokens", "> 50"))
            assert not any(stream.done() for stream in streams)
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)
        await page.wait_for("document.querySelectorAll('tr.request').length === 16")
        await page.wait_for(shows("streams", "=== 0"))


def shows(tile: str, comparison: str) -> str:
    """What a tile's number must be."""
    shown = f"document.querySelector('#{tile} strong')?.textContent.replace(',', '')"
    return f"parseFloat({shown}) {comparison}"


async def test_the_page_says_when_the_gateway_is_gone(
    gateway: RunningGateway, page: Browser
) -> None:
    await page.open(f"{gateway.url}/dashboard")
    await page.wait_for("document.querySelector('#status').textContent.includes('all well')")

    await gateway.rest.stop()

    await page.wait_for("document.querySelector('#status').textContent.includes('no answer')")
