"""What clients see of the gRPC calls behind their requests: sizes, cancels, stray errors."""

import asyncio
import json

import httpx
import pytest

from tests.gateway.fake_workers import Fault
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import RunningGateway, chat, completion, eventually

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def test_ids_above_grpcs_default_limit_come_back_and_are_refused_by_their_number(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    # GR-01: five million ids are more than 4 MiB on the wire.
    response = await http.post(COMPLETIONS, json=completion("x" * 5_000_000))

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "5000000" in error["message"]
    tokenized = await http.post("/tokenize", json={"prompt": "x" * 5_000_000})
    assert tokenized.json()["count"] == 5_000_000


async def test_reply_above_our_own_limit_is_the_clients_413_and_not_our_500(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    # GR-01: an id above 127 takes two bytes, so these are more than 16 MiB.
    body = json.dumps(completion("é" * 4_500_000), ensure_ascii=False).encode()

    response = await http.post(
        COMPLETIONS, content=body, headers={"content-type": "application/json"}
    )

    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert (await http.post(CHAT, json=chat())).status_code == 200


async def test_streams_that_are_left_midway_block_nobody(
    gateway: RunningGateway, http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    # GR-03
    mesh.model.answers = {b"user: long\n": [ord("x")] * 5000}
    mesh.decode.steps = asyncio.Semaphore(60)
    body = chat("long", stream=True, max_tokens=900)

    async def leave_after_a_chunk() -> None:
        async with http.stream("POST", CHAT, json=body) as response:
            await anext(aiter(response.aiter_lines()))

    await asyncio.gather(*(leave_after_a_chunk() for _ in range(20)))
    mesh.decode.steps = None
    async with asyncio.timeout(20):
        served = await asyncio.gather(*(http.post(CHAT, json=chat()) for _ in range(4)))

    assert [one.status_code for one in served] == [200] * 4
    await mesh.quiet()
    await eventually(lambda: not mesh.tokenizer.num_open and not mesh.prefill.held)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("error", [asyncio.CancelledError(), ValueError("secret")])
@pytest.mark.parametrize(
    "service", ["tokenizer", "scheduler", "prefill", "decode", "decode mid-stream"]
)
async def test_stray_error_in_a_service_is_an_answer_and_never_a_wait(
    http: httpx.AsyncClient, mesh: FakeMesh, service: str, error: BaseException, stream: bool
) -> None:
    # GR-04
    fault = Fault(after=3 if "mid" in service else 0, error=error, num_calls=100)  # type: ignore[arg-type]
    if service == "tokenizer":
        mesh.tokenizer.encode_error = error
    elif service == "scheduler":
        mesh.scheduler.error = error  # type: ignore[assignment]
    elif service == "prefill":
        mesh.prefill.faults = [fault]
    else:
        mesh.scheduler.local = True
        for decode in mesh.decodes:
            decode.faults = [fault]

    async with asyncio.timeout(20):
        response = await http.post(CHAT, json=chat(stream=stream, max_tokens=50))

    text = response.text
    assert "secret" not in text
    if stream and response.status_code == 200:
        # The status was sent: the error is the last thing before the end.
        assert '"error"' in text.split("\n\n")[-3]
        assert '"finish_reason":"' not in text
    else:
        assert response.status_code in (500, 503)
        assert response.json()["error"]["message"]
    await mesh.quiet()
