"""Parameters: what is accepted, what is refused, and what reaches the workers."""

import logging
from typing import Any

import httpx
import pytest

from tests.gateway.asking import BOTH, CHAT, COMPLETIONS, refused, sampling
from tests.gateway.fake_tokenizer import EOS, MODEL, VOCAB_SIZE, WINDOW
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, completion, events, text_of


async def test_unknown_fields_are_ignored_with_a_line_that_names_them(
    http: httpx.AsyncClient, mesh: FakeMesh, caplog: pytest.LogCaptureFixture
) -> None:
    # GW-14
    caplog.set_level(logging.DEBUG, "gateway")
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
    [line] = [one for one in caplog.records if one.message == "ignored unknown parameters"]
    assert line.levelno == logging.DEBUG
    assert line.__dict__["parameters"] == ["foo", "store"]


UNSUPPORTED = [
    (CHAT, "response_format", {"type": "json_object"}),
    (CHAT, "tool_choice", "required"),
    (CHAT, "tool_choice", {"type": "function", "function": {"name": "f"}}),
    (CHAT, "functions", [{"name": "f"}]),
    (CHAT, "function_call", {"name": "f"}),
    (CHAT, "audio", {"voice": "x"}),
    (CHAT, "modalities", ["text", "audio"]),
    (CHAT, "prediction", {"type": "content", "content": "x"}),
    (CHAT, "moderation", {"model": "omni-moderation-latest"}),
    (CHAT, "prompt_cache_options", {"mode": "explicit"}),
    (CHAT, "reasoning_effort", "high"),
    (CHAT, "guided_json", {"type": "object"}),
    (CHAT, "guided_regex", "a+"),
    (CHAT, "structured_outputs", {"regex": "a"}),
    (CHAT, "logit_processors", ["x"]),
    (CHAT, "store", True),
    (CHAT, "prompt_cache_retention", "24h"),
    (CHAT, "chat_template", "{{ 1 }}"),
    (CHAT, "add_special_tokens", True),
    (CHAT, "thinking_token_budget", 5),
    (COMPLETIONS, "add_special_tokens", False),
    (COMPLETIONS, "structural_tag", "{}"),
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
        (CHAT, {"parallel_tool_calls": False}),
        (COMPLETIONS, {"best_of": 1, "suffix": "", "echo": False, "guided_json": None}),
        (COMPLETIONS, {"service_tier": "auto", "use_beam_search": False}),
    ],
)
async def test_parameter_that_is_switched_off_passes(
    http: httpx.AsyncClient, path: str, more: dict[str, Any]
) -> None:
    make = chat if path == CHAT else completion
    assert (await http.post(path, json=make(**more))).status_code == 200


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


@pytest.mark.parametrize("prompt", [["a"] * 4097, [[1]] * 4097])
async def test_too_many_prompts_are_refused_before_each_costs_time(
    http: httpx.AsyncClient, prompt: Any
) -> None:
    assert (await refused(http, COMPLETIONS, completion(prompt)))["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["no-such-model", f" {MODEL}", MODEL.upper(), f"{MODEL} "])
@pytest.mark.parametrize(("path", "make"), BOTH)
async def test_unknown_model_is_404_and_no_worker_is_asked(
    http: httpx.AsyncClient, mesh: FakeMesh, path: str, make: Any, name: str, stream: bool
) -> None:
    # GW-20
    response = await http.post(path, json={**make(stream=stream), "model": name})

    assert response.status_code == 404
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert mesh.tokenizer.num_encodes == 0
    assert not mesh.scheduler.admits


@pytest.mark.parametrize("named", [{"model": name} for name in (None, 5, "", ["a"])] + [{}])
@pytest.mark.parametrize(("path", "make"), BOTH)
async def test_model_that_is_no_name_is_refused(
    http: httpx.AsyncClient, path: str, make: Any, named: dict[str, Any]
) -> None:
    # GW-20
    body = make()
    del body["model"]

    assert (await refused(http, path, body | named))["param"] == "model"


async def test_every_chunk_names_the_model_as_the_client_did(http: httpx.AsyncClient) -> None:
    # GW-20
    payloads = await events(http, CHAT, chat(stream=True, stream_options={"include_usage": True}))

    assert {payload["model"] for payload in payloads[:-1]} == {MODEL}


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
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "hi"}], "chat_template": "{{ 1 }}"},
            "chat_template",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_bad_tokenize_requests_are_refused_by_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    assert (await refused(http, path, body))["param"] == param
