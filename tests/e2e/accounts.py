"""What a gateway says of requests that a test sent, and what must hold for it."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import Any

import httpx
import pytest

from tests.e2e.harness import MODEL, Collector, RunningMesh, metric, metrics_addresses

PROMPT = "Where did the time of this request go, stage by stage? "


def bodies(number: int) -> dict[str, Any]:
    """Of all sorts: short and long prompts, whole and streamed, stopped early, two choices."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": f"{number}: " + PROMPT * (1 + number % 5 * 6),
        "max_tokens": 16,
        "temperature": 0.7,
        "seed": number,
        "stream": number % 3 > 0,
        "ignore_eos": True,
    }
    if number % 8 == 5:
        body["stop"] = ["e"]
    if number % 8 == 6:
        body["n"] = 2
    return body


async def finished(http: httpx.AsyncClient, number: int, **more: Any) -> dict[str, Any]:
    """One request's account by the gateway, and how long its client waited."""
    started = time.perf_counter()
    client_id = f"identity-{number}-{started}"
    headers = {"x-request-id": client_id}
    body = bodies(number) | more
    response = await http.post("/v1/completions", json=body, headers=headers)
    client_ms = (time.perf_counter() - started) * 1000
    assert response.status_code == 200, response.text
    account: dict[str, Any] = (await http.get(f"/dashboard/api/requests/{client_id}")).json()
    return {**account, "client_ms": client_ms}


async def left(http: httpx.AsyncClient, number: int, num_chunks: int) -> dict[str, Any]:
    """The account of a stream whose client went away after so many pieces of it."""
    started = time.perf_counter()
    client_id = f"left-{number}-{started}"
    body = bodies(number) | {"stream": True, "max_tokens": 400, "stop": None}
    headers = {"x-request-id": client_id}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        pieces = response.aiter_raw()
        for _ in range(num_chunks):
            await anext(pieces)
    # Time limits bound the wait.
    path = f"/dashboard/api/requests/{client_id}"
    while (found := await http.get(path)).status_code != 200:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return {**found.json(), "client_ms": (time.perf_counter() - started) * 1000}


def check_adds_up(account: dict[str, Any]) -> None:
    """The stages are all of the request's time, one after the other."""
    total_ms, stages_ms = account["total_ms"], account["stages_ms"]
    assert abs(total_ms - sum(stages_ms.values())) < allowed_ms(account), account
    # Closing what it used goes on while the client has its last byte already.
    assert total_ms <= account["client_ms"] + allowed_ms(account)
    ends_ms = 0.0
    for segment in account["segments"]:
        assert segment["start_ms"] == pytest.approx(ends_ms, abs=0.02)
        ends_ms = segment["start_ms"] + segment["ms"]
    assert ends_ms == pytest.approx(total_ms, abs=0.02)


async def check_traces(
    collector: Collector, accounts: Sequence[dict[str, Any]], wanted: set[str]
) -> None:
    """Each request is one trace: what it was for is in it, and every attempt at it."""
    by_trace = {account["trace_id"]: account for account in accounts}
    assert len(by_trace) == len(accounts)
    found: dict[str, Counter[str]] = {trace_id: Counter() for trace_id in by_trace}
    # Time limits bound the wait.
    while any(
        not wanted <= set(names) or names["gateway.attempt"] < by_trace[trace_id]["attempts"]
        for trace_id, names in found.items()
    ):
        _, span = await asyncio.to_thread(collector.spans.get, timeout=20)
        if span.trace_id.hex() in found:
            found[span.trace_id.hex()][span.name] += 1
    for trace_id, names in found.items():
        assert names["gateway.request"] == 1
        # Each choice is attempted; the account has the number of the one that took most.
        account = by_trace[trace_id]
        assert names["gateway.attempt"] <= account["attempts"] * account["choices"]


def check_mostly_named(accounts: list[dict[str, Any]]) -> None:
    """A name for everything is worth little if the name is always the same."""
    named_ms = sum(account["total_ms"] - account["stages_ms"]["network"] for account in accounts)
    assert named_ms > 0.7 * sum(account["total_ms"] for account in accounts)


def allowed_ms(account: dict[str, Any]) -> float:
    """How much of a request's time may have no name, or two."""
    return max(1.0, 0.02 * float(account["total_ms"]))


async def answered_although_a_decoder_dies(
    mesh: RunningMesh, requests: Sequence[Awaitable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Their accounts; the worker is killed while it runs some of them."""
    pids = {worker.name: worker.pid for worker in mesh.records("decode")}
    addresses = metrics_addresses(mesh)
    answers = asyncio.gather(*requests)
    while not answers.done():
        for name, pid in pids.items():
            num_running = await asyncio.to_thread(metric, addresses[name], "pdmesh_engine_running")
            if num_running:
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                return await answers
    raise AssertionError("they were over before a worker was seen at work")
