"""Sampling parameters: as sent to the workers, or refused by name."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.gateway.asking import BOTH, CHAT, COMPLETIONS, refused, sampling
from tests.gateway.fake_tokenizer import VOCAB_SIZE
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, completion, events, run_gateway, text_of

NULLABLE = [
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "seed",
    "stream",
    "stream_options",
    "logit_bias",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "user",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "response_format",
    "tools",
    "tool_choice",
    "metadata",
    "skip_special_tokens",
]


@pytest.mark.parametrize(("path", "make"), BOTH)
async def test_null_means_the_engines_own_default(
    http: httpx.AsyncClient, mesh: FakeMesh, path: str, make: Any
) -> None:
    # GW-03
    response = await http.post(path, json=make(**dict.fromkeys(NULLABLE)))

    assert response.status_code == 200
    assert sampling(mesh).HasField("seed")


async def test_models_suggestion_fills_only_what_the_client_left_out() -> None:
    # GW-03
    async with FakeMesh() as mesh:
        mesh.tokenizer.default_sampling_params.temperature = 0.6
        mesh.tokenizer.default_sampling_params.top_k = 40
        async with run_gateway(mesh) as gateway, httpx.AsyncClient(base_url=gateway.url) as http:
            await http.post(CHAT, json=chat())
            absent = sampling(mesh)
            await http.post(CHAT, json=chat(temperature=0, top_k=0, top_p=0))
            zero = sampling(mesh)
            await http.post(CHAT, json=chat(temperature=None))
            null = sampling(mesh)

    assert (absent.temperature, absent.top_k) == (0.6, 40)
    assert zero.HasField("temperature")
    assert (zero.temperature, zero.top_k, zero.top_p) == (0.0, 0, 0.0)
    assert not null.HasField("temperature")
    assert null.top_k == 40


async def test_sampling_parameters_reach_the_workers_as_sent(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    body = completion(
        temperature=0.7,
        top_p=0.9,
        top_k=-1,
        min_p=0.05,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.1,
        logit_bias={"5": 100, "6": -1.5},
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[7],
        bad_words=["no"],
        max_tokens=9,
        cache_salt="tenant",
        priority=-3,
    )

    response = await http.post(COMPLETIONS, json=body)

    assert response.status_code == 200
    params = mesh.decode.requests[-1].sampling_params
    assert params.temperature == 0.7
    assert (params.top_p, params.top_k, params.min_p) == (0.9, -1, 0.05)
    assert (params.presence_penalty, params.frequency_penalty) == (-2.0, 2.0)
    assert params.repetition_penalty == 1.1
    assert dict(params.logit_bias) == {5: 100.0, 6: -1.5}
    assert (params.min_tokens, params.ignore_eos, params.max_tokens) == (2, True, 9)
    assert list(params.stop_token_ids) == [7]
    assert [list(one.token_ids) for one in params.bad_words] == [list(b"no")]
    assert mesh.decode.requests[-1].cache_salt == "tenant"
    assert mesh.scheduler.admits[-1].priority == -3


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 1, 2**53 + 1, 2**63 - 1])
async def test_seed_reaches_the_workers_to_the_last_digit(
    http: httpx.AsyncClient, mesh: FakeMesh, seed: int
) -> None:
    # GW-07
    response = await http.post(CHAT, json=chat(seed=seed))

    assert response.status_code == 200
    assert sampling(mesh).seed == seed


@pytest.mark.parametrize("seed", [2**63, 2**64, -(2**63) - 1, 1.5, "7", True])
async def test_bad_seed_is_refused_by_name(http: httpx.AsyncClient, seed: Any) -> None:
    # GW-07
    error = await refused(http, CHAT, chat(seed=seed))

    assert error["param"] == "seed"
    assert (await http.post(CHAT, json=chat())).status_code == 200


async def test_seed_is_drawn_where_the_client_is_silent(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    seeds = set()
    for _ in range(3):
        await http.post(CHAT, json=chat())
        seeds.add(sampling(mesh).seed)

    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_stop_takes_a_string_or_a_list(http: httpx.AsyncClient) -> None:
    # GW-21
    texts = []
    stop: Any
    for stop in (", ", [", "], ["zz", ", "], ["o w", ", "]):
        choice = (await http.post(CHAT, json=chat(stop=stop))).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        texts.append(choice["message"]["content"])
    assert texts == ["Hello"] * 4

    nothing: list[Any] = [[], None]
    for stop in nothing:
        choice = (await http.post(CHAT, json=chat(stop=stop))).json()["choices"][0]
        assert choice["message"]["content"] == "Hello, world!"


@pytest.mark.parametrize(
    "stop", ["", [""], ["a", ""], [1], {"a": 1}, 5, True, ["x"] * 17, "x" * 1025]
)
async def test_bad_stop_is_refused(http: httpx.AsyncClient, stop: Any) -> None:
    # GW-21
    assert (await refused(http, CHAT, chat(stop=stop)))["param"] == "stop"


async def test_many_and_long_stop_strings_are_accepted(http: httpx.AsyncClient) -> None:
    # GW-21
    for stop in ([str(i) * 3 for i in range(5)], ["x" * 1024], ["y"] * 16):
        response = await http.post(CHAT, json=chat(stop=stop))
        assert response.json()["choices"][0]["message"]["content"] == "Hello, world!"


@pytest.mark.parametrize("n", [0, -1, 1000, True, 1.5, "2"])
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_n_is_refused_at_once(http: httpx.AsyncClient, n: Any, stream: bool) -> None:
    # GW-22
    assert (await refused(http, CHAT, chat(n=n, stream=stream)))["param"] == "n"


async def test_choices_have_their_own_seeds_and_count_the_prompt_once(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    # GW-22
    body = chat(n=3, temperature=0.8, seed=5, max_tokens=4)
    whole = (await http.post(CHAT, json=body)).json()
    seeds = [request.sampling_params.seed for request in mesh.prefill.requests]
    payloads = await events(
        http, CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}}
    )

    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["prompt_tokens"] == len(b"user: hi\n")
    assert whole["usage"]["completion_tokens"] == 12
    assert mesh.tokenizer.num_encodes == 2
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    # The siblings of the first may overtake each other.
    again = [request.sampling_params.seed for request in mesh.prefill.requests[3:]]
    assert sorted(again) == sorted(seeds)
    assert payloads.count("[DONE]") == 1
    finished = [
        choice["index"]
        for payload in payloads[:-1]
        for choice in payload["choices"]
        if choice["finish_reason"]
    ]
    assert sorted(finished) == [0, 1, 2]
    assert payloads[-2]["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        assert text_of(payloads, index) == choice["message"]["content"]


async def test_other_choices_start_when_the_first_has_its_prompt_computed(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    # GW-22: they find the prompt in the prefix cache.
    mesh.prefill.steps = asyncio.Semaphore(0)
    asking = asyncio.create_task(http.post(CHAT, json=chat(n=3)))
    await mesh.prefill.was_active.wait()
    assert len(mesh.scheduler.admits) == 1
    for _ in range(3):
        mesh.prefill.steps.release()
    await asking

    first, *others = mesh.prefill.requests
    assert first.request_id.endswith("-0")
    assert {request.request_id[-2:] for request in others} == {"-1", "-2"}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": -1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 2.5}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 8.0}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"stream_options": 5, "stream": True}, "stream_options"),
        (
            {"stream_options": {"include_usage": "y"}, "stream": True},
            "stream_options.include_usage",
        ),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {str(VOCAB_SIZE): 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"AI": -100}}, "logit_bias"),
        ({"logit_bias": {"1.5": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"logit_bias": {"5": None}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [7] * 1025}, "stop_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"user": 5}, "user"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"tools": [{"type": "x"}]}, "tools[0]"),
        ({"tools": {}}, "tools"),
    ],
)
async def test_bad_value_is_refused_by_name(
    http: httpx.AsyncClient, mesh: FakeMesh, more: dict[str, Any], param: str
) -> None:
    # SA-09 and the rules of cases/README.md
    error = await refused(http, CHAT, chat(**more))

    assert error["param"] == param
    assert not mesh.scheduler.admits


async def test_two_equal_spellings_of_one_parameter_are_fine(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    await http.post(CHAT, json=chat(max_tokens=5, max_completion_tokens=5))
    assert sampling(mesh).max_tokens == 5
    await http.post(CHAT, json=chat(max_completion_tokens=6))
    assert sampling(mesh).max_tokens == 6
