"""Parameters: what is accepted, what is refused, and what reaches the workers."""

import asyncio
from typing import Any

import httpx
import pytest

from mesh.v1 import types_pb2
from tests.gateway.fakes import EOS, MODEL, VOCAB_SIZE, WINDOW, FakeMesh
from tests.gateway.running import chat, completion, events, run_gateway, text_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BOTH = [(CHAT, chat), (COMPLETIONS, completion)]


async def refused(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def sampling(mesh: FakeMesh) -> types_pb2.SamplingParams:
    return mesh.prefill.requests[-1].sampling_params


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


async def test_unknown_fields_are_ignored(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    # GW-14
    message = {"role": "user", "content": "hello", "name": "ada", "id": 7}
    plain = await http.post(CHAT, json=chat("hello"))
    response = await http.post(
        CHAT,
        json={
            "model": MODEL,
            "messages": [message],
            "store": False,
            "metadata": {"k": "v"},
            "foo": {"bar": [1, {}]},
        },
    )

    assert response.status_code == 200
    assert response.json()["choices"] == plain.json()["choices"]
    # Templates see the message as it was written.
    assert '"id": 7' in mesh.tokenizer.chats[-1].messages_json


UNSUPPORTED = [
    (CHAT, "response_format", {"type": "json_object"}),
    (CHAT, "tool_choice", "required"),
    (CHAT, "tool_choice", {"type": "function", "function": {"name": "f"}}),
    (CHAT, "functions", [{"name": "f"}]),
    (CHAT, "function_call", {"name": "f"}),
    (CHAT, "audio", {"voice": "x"}),
    (CHAT, "modalities", ["text", "audio"]),
    (CHAT, "prediction", {"type": "content", "content": "x"}),
    (CHAT, "parallel_tool_calls", False),
    (CHAT, "reasoning_effort", "high"),
    (CHAT, "guided_json", {"type": "object"}),
    (CHAT, "guided_regex", "a+"),
    (CHAT, "structured_outputs", {"regex": "a"}),
    (CHAT, "logit_processors", ["x"]),
    (CHAT, "store", True),
    (CHAT, "prompt_cache_retention", "24h"),
    (CHAT, "chat_template", "{{ 1 }}"),
    (CHAT, "prompt_logprobs", 1),
    (COMPLETIONS, "best_of", 2),
    (COMPLETIONS, "suffix", "end"),
    (CHAT, "echo", True),
    (COMPLETIONS, "guided_choice", ["a"]),
    (COMPLETIONS, "use_beam_search", True),
    (COMPLETIONS, "prompt_logprobs", 0),
    (COMPLETIONS, "truncate_prompt_tokens", 5),
    (COMPLETIONS, "service_tier", "priority"),
]


@pytest.mark.parametrize(("path", "name", "value"), UNSUPPORTED)
@pytest.mark.parametrize("stream", [False, True])
async def test_known_parameter_without_support_is_refused_by_name(
    http: httpx.AsyncClient, path: str, name: str, value: Any, stream: bool
) -> None:
    # GW-15
    make = chat if path == CHAT else completion
    error = await refused(http, path, make(stream=stream, **{name: value}))

    assert error["code"] == "unsupported_parameter"
    assert error["param"] == name


async def test_padding_of_events_is_refused_by_name(http: httpx.AsyncClient) -> None:
    options = {"include_obfuscation": True}
    error = await refused(http, CHAT, chat(stream=True, stream_options=options))

    assert error["code"] == "unsupported_parameter"
    assert error["param"] == "stream_options.include_obfuscation"


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"response_format": {"type": "text"}, "tool_choice": "auto", "tools": []}),
        (CHAT, {"functions": [], "function_call": "none", "modalities": ["text"]}),
        (COMPLETIONS, {"best_of": 1, "suffix": "", "echo": False, "guided_json": None}),
        (COMPLETIONS, {"service_tier": "auto", "use_beam_search": False}),
    ],
)
async def test_parameter_that_is_switched_off_passes(
    http: httpx.AsyncClient, path: str, more: dict[str, Any]
) -> None:
    make = chat if path == CHAT else completion
    assert (await http.post(path, json=make(**more))).status_code == 200


async def test_tools_are_rendered_unless_the_client_forbids_their_use(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    tools = [{"type": "function", "function": {"name": "df", "parameters": {}}}]

    await http.post(CHAT, json=chat(tools=tools))
    assert '"name": "df"' in mesh.tokenizer.chats[-1].tools_json
    await http.post(CHAT, json=chat(tools=tools, tool_choice="none"))
    assert mesh.tokenizer.chats[-1].tools_json == ""


async def test_template_options_reach_the_tokenizer(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    await http.post(CHAT, json=chat(chat_template_kwargs={"x": 1}, continue_final_message=True))
    sent = mesh.tokenizer.chats[-1]
    assert sent.template_kwargs_json == '{"x": 1}'
    assert (sent.continue_final_message, sent.add_generation_prompt) == (True, False)

    await http.post(CHAT, json=chat())
    assert mesh.tokenizer.chats[-1].add_generation_prompt

    error = await refused(http, CHAT, chat(continue_final_message=True, add_generation_prompt=True))
    assert error["param"] == "continue_final_message"


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
async def test_tool_calls_come_without_content(
    http: httpx.AsyncClient, mesh: FakeMesh, content: dict[str, Any]
) -> None:
    # GW-16
    call = {"id": "c1", "type": "function", "function": {"name": "df", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "check disk"},
        {"role": "assistant", "tool_calls": [call], **content},
        {"role": "tool", "tool_call_id": "c1", **content},
        {"role": "user", "content": "so?"},
    ]

    response = await http.post(CHAT, json={"model": MODEL, "messages": messages})

    assert response.status_code == 200
    prompt = bytes(mesh.prefill.requests[-1].prompt_token_ids)
    assert prompt == b"user: check disk\nassistant: \ntool: \nuser: so?\n"


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool", "developer"])
async def test_text_parts_are_accepted_in_every_role(http: httpx.AsyncClient, role: str) -> None:
    # GW-17
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello"}]
    messages = [{"role": role, "content": parts}, {"role": "user", "content": "hi"}]

    assert (await http.post(CHAT, json={"model": MODEL, "messages": messages})).status_code == 200


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:,x"}},
        {"type": "input_audio", "input_audio": {}},
        {"text": "no type"},
        {"type": "text"},
        {"type": "text", "text": None},
        "bare",
        7,
        None,
    ],
)
async def test_part_that_is_no_text_is_refused_by_place(http: httpx.AsyncClient, part: Any) -> None:
    # GW-17
    content = [{"type": "text", "text": "a"}, part]
    error = await refused(
        http, CHAT, {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    )

    assert error["param"] == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        ([{}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (["hi"], "messages[0]"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ],
)
async def test_bad_messages_are_refused_by_place(
    http: httpx.AsyncClient, messages: Any, param: str
) -> None:
    # GW-18
    error = await refused(http, CHAT, {"model": MODEL, "messages": messages})

    assert error["param"] == param


async def test_missing_messages_and_prompt_are_refused(http: httpx.AsyncClient) -> None:
    # GW-18
    assert (await refused(http, CHAT, {"model": MODEL}))["param"] == "messages"
    assert (await refused(http, COMPLETIONS, {"model": MODEL}))["param"] == "prompt"


async def test_empty_user_content_is_a_prompt(http: httpx.AsyncClient) -> None:
    # GW-18
    assert (await http.post(CHAT, json=chat(""))).status_code == 200


@pytest.mark.parametrize(
    "prompt",
    ["", [""], [], [[]], ["a", ""], [[1], []], None, 5, {}, [1, "a"], [1.5], [True], [[1], 2]],
)
async def test_prompt_without_tokens_is_refused(http: httpx.AsyncClient, prompt: Any) -> None:
    # GW-18
    error = await refused(http, COMPLETIONS, completion(prompt))

    assert error["param"] == "prompt"
    assert (await http.post(COMPLETIONS, json=completion())).status_code == 200


async def test_list_of_prompts_gives_a_choice_for_each(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    # GW-18
    mesh.model.answers = {b"a": [*b"first", EOS], b"b": [*b"second", EOS]}

    response = (await http.post(COMPLETIONS, json=completion(["a", "b"]))).json()
    streamed = await events(http, COMPLETIONS, completion(["a", "b"], stream=True))
    by_ids = (await http.post(COMPLETIONS, json=completion([[97], [98]]))).json()

    assert [choice["index"] for choice in response["choices"]] == [0, 1]
    assert [choice["text"] for choice in response["choices"]] == ["first", "second"]
    assert response["usage"]["prompt_tokens"] == 2
    assert response["usage"]["completion_tokens"] == len(b"first") + len(b"second") + 2
    assert [text_of(streamed, index) for index in (0, 1)] == ["first", "second"]
    assert by_ids["choices"] == response["choices"]


async def test_token_outside_the_vocabulary_is_refused(http: httpx.AsyncClient) -> None:
    for prompt in ([VOCAB_SIZE], [-1], [2**40]):
        assert (await refused(http, COMPLETIONS, completion(prompt)))["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["no-such-model", f" {MODEL}", MODEL.upper(), f"{MODEL} "])
async def test_unknown_model_is_404_and_no_worker_is_asked(
    http: httpx.AsyncClient, mesh: FakeMesh, name: str, stream: bool
) -> None:
    # GW-20
    response = await http.post(CHAT, json={**chat(stream=stream), "model": name})

    assert response.status_code == 404
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert mesh.tokenizer.num_encodes == 0
    assert not mesh.scheduler.admits


@pytest.mark.parametrize("name", [None, 5, "", ["a"]])
async def test_model_that_is_no_name_is_refused(http: httpx.AsyncClient, name: Any) -> None:
    # GW-20
    assert (await refused(http, CHAT, {**chat(), "model": name}))["param"] == "model"
    body = chat()
    del body["model"]
    assert (await refused(http, CHAT, body))["param"] == "model"


async def test_every_chunk_names_the_model_as_the_client_did(http: httpx.AsyncClient) -> None:
    # GW-20
    payloads = await events(http, CHAT, chat(stream=True, stream_options={"include_usage": True}))

    assert {payload["model"] for payload in payloads[:-1]} == {MODEL}


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


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], {"a": 1}, 5, True, ["x"] * 17])
async def test_bad_stop_is_refused(http: httpx.AsyncClient, stop: Any) -> None:
    # GW-21
    assert (await refused(http, CHAT, chat(stop=stop)))["param"] == "stop"


async def test_many_and_long_stop_strings_are_accepted(http: httpx.AsyncClient) -> None:
    # GW-21
    for stop in ([str(i) * 3 for i in range(5)], ["x" * 10_000], ["y"] * 16):
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


LONG = [ord("a")] * (WINDOW + 100)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "numbers"),
    [
        (COMPLETIONS, completion(LONG), [WINDOW + 100, WINDOW]),
        (COMPLETIONS, completion("a" * (WINDOW + 100)), [WINDOW + 100, WINDOW]),
        (COMPLETIONS, completion(LONG[:WINDOW]), [WINDOW]),
        (COMPLETIONS, completion(LONG[: WINDOW - 50], max_tokens=51), [WINDOW - 50, 51]),
        (CHAT, chat("a" * WINDOW), [WINDOW + 7, WINDOW]),
        (CHAT, chat("a" * 900, max_tokens=500), [907, 500, WINDOW]),
        (CHAT, chat("a" * 900, max_completion_tokens=500), [907, 500, WINDOW]),
    ],
)
async def test_what_does_not_fit_is_refused_with_the_numbers(
    http: httpx.AsyncClient,
    mesh: FakeMesh,
    path: str,
    body: dict[str, Any],
    numbers: list[int],
    stream: bool,
) -> None:
    # GW-23
    error = await refused(http, path, {**body, "stream": stream})

    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("prompt" if path == COMPLETIONS else "messages")
    assert all(str(number) in error["message"] for number in numbers)
    assert "-" not in error["message"].replace("-model", "")
    assert not mesh.scheduler.admits


async def test_output_is_bounded_by_what_fits_when_nothing_is_asked(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    # GW-23
    await http.post(CHAT, json=chat("a" * 900))
    assert sampling(mesh).max_tokens == WINDOW - 907
    await http.post(COMPLETIONS, json=completion(LONG[: WINDOW - 5]))
    assert sampling(mesh).max_tokens == 5
    await http.post(COMPLETIONS, json=completion())
    assert sampling(mesh).max_tokens == 16


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


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/tokenize", 405),
    ],
)
async def test_errors_of_the_router_have_openais_form(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await http.request(method, path)

    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert response.headers["x-request-id"]
    if status == 405:
        assert response.headers["allow"]


async def test_tokenize_and_detokenize_have_vllms_shapes(http: httpx.AsyncClient) -> None:
    text = (await http.post("/tokenize", json={"model": MODEL, "prompt": "hé"})).json()
    messages = [{"role": "user", "content": "hi"}]
    rendered = (await http.post("/tokenize", json={"messages": messages})).json()
    named = (await http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    back = (await http.post("/detokenize", json={"tokens": text["tokens"]})).json()

    assert text == {
        "count": 3,
        "max_model_len": WINDOW,
        "tokens": list("hé".encode()),
        "token_strs": None,
    }
    assert rendered["tokens"] == list(b"user: hi\n")
    assert named["token_strs"] == ["h", "\ufffd", "\ufffd"]
    assert back == {"prompt": "hé"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": False}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_bad_tokenize_requests_are_refused_by_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    assert (await refused(http, path, body))["param"] == param
