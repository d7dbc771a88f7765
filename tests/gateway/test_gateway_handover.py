"""Decode starts while prefill runs: the client sees the first token no later, and each one once."""

import asyncio
from typing import Any

import httpx
import pytest

from mesh.errors import KvTransferFailed, QueueFull, WorkerUnavailable
from tests.gateway.fake_workers import Fault
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, events, eventually, text_of

CHAT = "/v1/chat/completions"
HELLO = "Hello, world!"


@pytest.fixture
def chunked(mesh: FakeMesh) -> FakeMesh:
    """Prompts take more than one chunk."""
    mesh.prefill.is_chunked = True
    return mesh


async def ask(http: httpx.AsyncClient, **more: Any) -> str:
    payloads = await events(http, CHAT, chat(stream=True, **more))
    assert payloads[-1] == "[DONE]"
    return text_of(payloads)


async def test_decode_is_called_while_the_prompt_is_computed(
    http: httpx.AsyncClient, chunked: FakeMesh
) -> None:
    chunked.prefill.finish_gate.clear()
    asking = asyncio.create_task(ask(http))

    await eventually(lambda: bool(chunked.decode.requests))
    chunked.prefill.finish_gate.set()

    assert await asking == HELLO
    [request] = chunked.decode.requests
    assert request.awaits_first_token
    assert list(request.output_token_ids) == []
    assert request.kv_handle.handle_id


async def test_first_token_does_not_wait_for_decode(
    http: httpx.AsyncClient, chunked: FakeMesh
) -> None:
    chunked.decode.start_gate = asyncio.Event()
    async with http.stream("POST", CHAT, json=chat(stream=True)) as response:
        lines = response.aiter_lines()
        async with asyncio.timeout(20):
            while "H" not in await anext(lines):
                pass
        chunked.decode.start_gate.set()
        rest = [line async for line in lines]

    assert rest[-2:] == ["data: [DONE]", ""]


async def test_sequence_of_one_token_needs_no_decode(
    http: httpx.AsyncClient, chunked: FakeMesh
) -> None:
    assert await ask(http, max_tokens=1) == "H"

    assert chunked.decode.requests == []


async def test_prefill_that_fails_ends_the_decode_that_awaits_it(
    http: httpx.AsyncClient, chunked: FakeMesh
) -> None:
    # KV-19
    chunked.prefill.faults = [Fault(error=WorkerUnavailable("gone"))]

    await http.post(CHAT, json=chat())

    await chunked.quiet()
    await eventually(lambda: not chunked.prefill.held)


@pytest.mark.parametrize(
    "error", [WorkerUnavailable("gone"), KvTransferFailed("lost"), QueueFull("full")]
)
async def test_decode_that_fails_early_costs_no_token(
    http: httpx.AsyncClient, chunked: FakeMesh, error: Exception
) -> None:
    # KV-20
    chunked.decode.faults = [Fault(after=0, error=error)]

    assert await ask(http) == HELLO

    await chunked.quiet()
    await eventually(lambda: not chunked.prefill.held)


async def test_client_that_leaves_ends_both_calls(
    http: httpx.AsyncClient, chunked: FakeMesh
) -> None:
    # KV-16
    chunked.prefill.finish_gate.clear()
    asking = asyncio.create_task(ask(http))
    await eventually(lambda: bool(chunked.decode.requests))

    asking.cancel()
    await asyncio.wait([asking])

    await chunked.quiet()
