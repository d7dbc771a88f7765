"""`echo`: completions that begin with their prompt."""

from typing import Any

import httpx
import pytest

from tests.gateway.fake_tokenizer import EOS
from tests.gateway.fake_workers import Fault
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import completion, events, text_of

PATH = "/v1/completions"


@pytest.mark.parametrize("prompt", ["hé ", [104, 0xC3, 0xA9, 32]])
@pytest.mark.parametrize("local", [False, True])
async def test_text_begins_with_the_prompt(
    http: httpx.AsyncClient, mesh: FakeMesh, prompt: Any, local: bool
) -> None:
    mesh.scheduler.local = local
    body = completion(prompt, echo=True)
    whole = (await http.post(PATH, json=body)).json()
    payloads = await events(http, PATH, body | {"stream": True})

    assert whole["choices"][0]["text"] == "hé Hello, world!"
    assert payloads[0]["choices"][0]["text"] == "hé "
    assert text_of(payloads) == "hé Hello, world!"
    assert whole["usage"]["completion_tokens"] == len("Hello, world!") + 1


async def test_each_choice_begins_with_its_own_prompt(http: httpx.AsyncClient) -> None:
    body = completion(["a ", "b "], echo=True, n=2, max_tokens=1)
    whole = (await http.post(PATH, json=body)).json()

    assert [choice["text"] for choice in whole["choices"]] == ["a H", "a H", "b H", "b H"]


async def test_stop_strings_look_at_the_answer_alone(http: httpx.AsyncClient) -> None:
    body = completion("Hello and wor", echo=True, stop=["world", "and"])
    whole = (await http.post(PATH, json=body)).json()

    assert whole["choices"][0]["text"] == "Hello and worHello, "


@pytest.mark.parametrize("local", [False, True])
async def test_logprobs_describe_the_prompt_too(
    http: httpx.AsyncClient, mesh: FakeMesh, local: bool
) -> None:
    mesh.scheduler.local = local
    mesh.model.default = [*b"xy", EOS]
    body = completion("aéb", echo=True, logprobs=1)
    whole = (await http.post(PATH, json=body)).json()
    payloads = await events(http, PATH, body | {"stream": True})

    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "\ufffd", "\ufffd", "b", "x", "y", "<eos>"]
    # Nothing comes before the first token.
    assert logprobs["token_logprobs"] == [None] + [-0.5] * 6
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3:5] == [{"b": -0.5}, {"x": -0.5}]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4, 5]
    for name in logprobs:
        streamed = [
            one
            for payload in payloads[:-1]
            for one in (payload["choices"][0]["logprobs"] or {}).get(name, [])
        ]
        assert streamed == logprobs[name]


async def test_prompt_of_one_token_is_described_without_a_probability(
    http: httpx.AsyncClient,
) -> None:
    whole = (
        await http.post(PATH, json=completion("a", echo=True, logprobs=0, max_tokens=1))
    ).json()

    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "H"]
    assert logprobs["token_logprobs"] == [None, -0.5]


@pytest.mark.parametrize("made", [b"xy", b""])
@pytest.mark.parametrize("local", [False, True])
async def test_no_tokens_wanted_gives_the_prompt_and_what_is_known_of_it(
    http: httpx.AsyncClient, mesh: FakeMesh, local: bool, made: bytes
) -> None:
    mesh.scheduler.local = local
    mesh.model.default = [*made, EOS]
    body = completion("ab", echo=True, logprobs=0, max_tokens=0, stop=["x"])
    whole = (await http.post(PATH, json=body)).json()
    payloads = await events(http, PATH, body | {"stream": True})

    [choice] = whole["choices"]
    assert choice["text"] == text_of(payloads) == "ab"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert payloads[-2]["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 0


async def test_no_tokens_wanted_without_echo_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post(PATH, json=completion("ab", max_tokens=0))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_resumed_answer_echoes_once(
    http: httpx.AsyncClient, mesh: FakeMesh, after: int
) -> None:
    mesh.scheduler.local = True
    mesh.decode.faults = [Fault(after=after)]
    whole = (await http.post(PATH, json=completion("ab", echo=True, logprobs=0))).json()

    assert whole["choices"][0]["text"] == "abHello, world!"
    assert whole["choices"][0]["logprobs"]["tokens"][:4] == ["a", "b", "H", "e"]


async def test_prompt_logprobs_are_not_computed_unless_asked_for(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    await http.post(PATH, json=completion("ab", echo=True))
    await http.post(PATH, json=completion("ab", logprobs=1))

    assert not any(
        one.sampling_params.HasField("num_prompt_logprobs") for one in mesh.prefill.requests
    )
