"""Clients that leave in crowds, in any state, leave nothing, and the next one does not wait."""

import asyncio
import random
import time
from statistics import median

import httpx
import pytest

from tests.chaos.cells import CLEAN_WITHIN_S, gateway_urls
from tests.chaos.probe import MeshProbe
from tests.chaos.streams import NUM_STREAMS, body

NUM_REQUESTS = 300
STORM_S = 20.0
# All that an idle mesh takes for one request, and what a busy machine may add.
_MAX_SLOWDOWN = 3.0
_SLACK_S = 0.5


async def first_token_s(http: httpx.AsyncClient, url: str, cache_salt: str) -> float:
    started = time.monotonic()
    path = f"{url}/v1/completions"
    async with http.stream("POST", path, json=body(0, cache_salt)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                return time.monotonic() - started
    raise AssertionError("the stream ended without a token")


async def leave(
    http: httpx.AsyncClient, url: str, number: int, delay_s: float, stay_s: float
) -> str:
    """Ask after `delay_s` and go away after `stay_s`, whatever has come by then."""
    await asyncio.sleep(delay_s)
    asked = body(number % NUM_STREAMS, f"storm-{number}")
    try:
        async with asyncio.timeout(stay_s):
            async with http.stream("POST", f"{url}/v1/completions", json=asked) as response:
                await response.aread()
                return str(response.status_code)
    except TimeoutError:
        return "left"


@pytest.mark.timeout(120)
async def test_abort_storm(probe: MeshProbe) -> None:
    chance = random.Random(11)
    urls = gateway_urls(probe)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=60, limits=limits) as http:
        before = [await first_token_s(http, urls[0], f"before-{n}") for n in range(3)]
        assert await probe.wait_until_clean(CLEAN_WITHIN_S) == {}

        storm = [
            leave(
                http,
                urls[number % len(urls)],
                number,
                delay_s := chance.uniform(0, STORM_S - 2),
                # Some at once, most within two seconds, a few never before the end of the storm.
                min(chance.expovariate(1.5), STORM_S - delay_s),
            )
            for number in range(NUM_REQUESTS)
        ]
        outcomes = await asyncio.gather(*storm)
        left = await probe.wait_until_clean(CLEAN_WITHIN_S)
        after = [await first_token_s(http, urls[0], f"after-{n}") for n in range(3)]

    assert left == {}
    assert set(outcomes) <= {"left", "200", "429"}, outcomes
    assert outcomes.count("left") > NUM_REQUESTS / 2
    assert min(after) < _MAX_SLOWDOWN * median(before) + _SLACK_S, (before, after)
    assert await probe.wait_until_clean(CLEAN_WITHIN_S) == {}
    assert await probe.wait_until_whole(CLEAN_WITHIN_S) == {}
