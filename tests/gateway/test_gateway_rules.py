"""Parameter rules over HTTP: what reaches the workers, and what clients are told."""

import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mesh.errors import WorkerUnavailable
from mesh.v1 import types_pb2
from tests.gateway.fake_tokenizer import MODEL
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, completion, events, eventually, run_gateway

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BOTH = [(CHAT, chat), (COMPLETIONS, completion)]
ACTIONS = "x-pdmesh-param-actions"
TOOL = {"type": "function", "function": {"name": "look"}}

# The example that docs/rules.md begins with.
DOCUMENTED = Path("docs/rules.md").read_text().split("```yaml\n")[1].split("```")[0]

# A falsy value that the client sends, and what a rule would have put there.
FALSY: list[tuple[str, Any, Any]] = [
    ("temperature", 0, 0.9),
    ("top_p", 0, 0.5),
    ("top_k", 0, 7),
    ("min_p", 0, 0.5),
    ("presence_penalty", 0, 1.5),
    ("frequency_penalty", 0, 1.5),
    ("seed", 0, 7),
    ("n", 1, 2),
    ("stream", False, True),
    ("logprobs", False, True),
    ("stop", [], ["wor"]),
    ("stop", "", ["wor"]),
    ("tools", [], [TOOL]),
    ("logit_bias", {}, {"5": -100}),
    ("user", "", "ada"),
    ("ignore_eos", False, True),
]


@asynccontextmanager
async def ruled(mesh: FakeMesh, path: Path, rules: str) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway with these rules."""
    write(path, rules)
    async with (
        run_gateway(mesh, rules_path=path, rules_check_interval_s=0.01) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
    ):
        yield http


def write(path: Path, rules: str) -> None:
    """A new file in place of the old one, as deployments do it."""
    fresh = path.with_suffix(".new")
    fresh.write_text(f"rules: {rules}")
    os.replace(fresh, path)


def sampling(mesh: FakeMesh) -> types_pb2.SamplingParams:
    return mesh.prefill.requests[-1].sampling_params


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def filling(
    shared_mesh: FakeMesh, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that fills in the parameter which the header x-fill names."""
    rules = [
        {"when": {"header": {"x-fill": name}}, "default": {name: value}}
        for name, value in {name: value for name, _, value in FALSY}.items()
    ]
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    async with ruled(shared_mesh, path, json.dumps(rules)) as http:
        yield http


@pytest.mark.parametrize("zero", ["0", "0.0", "-0.0", "0e0"])
@pytest.mark.parametrize(("path", "make"), BOTH)
async def test_temperature_zero_is_not_replaced_by_a_default(
    filling: httpx.AsyncClient, mesh: FakeMesh, path: str, make: Any, zero: str
) -> None:
    # GW-01
    body = json.dumps(make(temperature="ZERO")).replace('"ZERO"', zero)

    response = await filling.post(
        path, content=body, headers={"x-fill": "temperature", "content-type": "application/json"}
    )

    assert response.status_code == 200
    assert sampling(mesh).HasField("temperature")
    assert sampling(mesh).temperature == 0
    assert ACTIONS not in response.headers


@pytest.mark.parametrize(("name", "sent", "default"), FALSY)
async def test_falsy_value_of_the_client_is_kept(
    filling: httpx.AsyncClient,
    http: httpx.AsyncClient,
    mesh: FakeMesh,
    name: str,
    sent: Any,
    default: Any,
) -> None:
    # GW-02
    body = chat(**{"seed": 1, name: sent})

    kept = await filling.post(CHAT, json=body, headers={"x-fill": name})
    kept_calls = [call.sampling_params for call in mesh.prefill.requests]
    mesh.reset()
    plain = await http.post(CHAT, json=body)
    plain_calls = [call.sampling_params for call in mesh.prefill.requests]

    assert kept.status_code == plain.status_code
    assert kept_calls == plain_calls
    assert kept.json().get("choices") == plain.json().get("choices")
    assert ACTIONS not in kept.headers


@pytest.mark.parametrize(("name", "default"), {name: value for name, _, value in FALSY}.items())
async def test_absent_parameter_is_filled_in(
    filling: httpx.AsyncClient, http: httpx.AsyncClient, mesh: FakeMesh, name: str, default: Any
) -> None:
    body = chat() | ({} if name == "seed" else {"seed": 1})

    filled = await filling.post(CHAT, json=body, headers={"x-fill": name})
    filled_calls = [call.sampling_params for call in mesh.prefill.requests]
    mesh.reset()
    explicit = await http.post(CHAT, json=body | {name: default})
    explicit_calls = [call.sampling_params for call in mesh.prefill.requests]

    assert filled.status_code == explicit.status_code == 200
    assert filled_calls == explicit_calls
    assert filled.headers["content-type"] == explicit.headers["content-type"]
    assert filled.headers[ACTIONS] == f"default:{name}"


@pytest.mark.parametrize(("path", "make"), BOTH)
async def test_explicit_null_is_the_clients_decision(
    mesh: FakeMesh, tmp_path: Path, path: str, make: Any
) -> None:
    # GW-03
    nulls = dict.fromkeys(("max_tokens", "stop", "seed", "stream", "logit_bias", "n"))
    rules = "[{default: {max_tokens: 5, stop: [Hello], n: 2}}]"
    async with ruled(mesh, tmp_path / "rules.yaml", rules) as http:
        response = await http.post(path, json=make(temperature=0, **nulls))

    assert response.status_code == 200
    assert ACTIONS not in response.headers
    assert len(response.json()["choices"]) == 1
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert sampling(mesh).max_tokens > 5


async def test_without_rules_no_parameter_is_added(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    # GW-04
    response = await http.post(CHAT, json=chat())

    # The window bounds every request, and every request has a seed.
    assert {field.name for field, _ in sampling(mesh).ListFields()} == {"max_tokens", "seed"}
    assert ACTIONS not in response.headers


@pytest.mark.parametrize(
    ("sent", "expected", "actions"),
    [
        ({"max_tokens": 5}, 5, None),
        ({"max_completion_tokens": 5}, 5, None),
        ({}, 512, "default:max_tokens"),
    ],
)
async def test_default_never_replaces_and_the_first_rule_wins(
    mesh: FakeMesh, tmp_path: Path, sent: dict[str, Any], expected: int, actions: str | None
) -> None:
    # GW-05
    rules = "[{default: {max_tokens: 512}}, {default: {max_tokens: 64}}]"
    async with ruled(mesh, tmp_path / "rules.yaml", rules) as http:
        response = await http.post(CHAT, json=chat(**sent))

    assert response.status_code == 200
    assert sampling(mesh).max_tokens == expected
    assert response.headers.get(ACTIONS) == actions


async def test_clamp_and_force_are_the_operators_word(mesh: FakeMesh, tmp_path: Path) -> None:
    rules = "[{clamp: {max_tokens: {max: 4}}, force: {seed: 7}}]"
    async with ruled(mesh, tmp_path / "rules.yaml", rules) as http:
        response = await http.post(CHAT, json=chat(max_tokens=100, seed=1))

    assert response.json()["choices"][0]["message"]["content"] == "Hell"
    assert (sampling(mesh).max_tokens, sampling(mesh).seed) == (4, 7)
    assert response.headers[ACTIONS] == "clamp:max_tokens, force:seed"


async def test_rules_of_the_documentation_refuse_neither_whole_answers_nor_streams(
    mesh: FakeMesh, tmp_path: Path
) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(DOCUMENTED.replace("smollm2-*", MODEL))
    async with (
        run_gateway(mesh, rules_path=path) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
    ):
        whole = await http.post(CHAT, json=chat())
        streamed = await events(http, CHAT, chat(stream=True))

    assert whole.status_code == 200
    assert whole.headers[ACTIONS] == "default:temperature"
    assert streamed[-2]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_rewritten_model_is_answered_under_the_clients_name(
    mesh: FakeMesh, tmp_path: Path, stream: bool
) -> None:
    rules = f"[{{rewrite_model: {{gpt-4o: {MODEL}}}}}]"
    async with ruled(mesh, tmp_path / "rules.yaml", rules) as http:
        body = chat(stream=stream) | {"model": "gpt-4o"}
        if stream:
            answers = (await events(http, CHAT, body))[:-1]
        else:
            answers = [(await http.post(CHAT, json=body)).json()]

    assert {answer["model"] for answer in answers} == {"gpt-4o"}
    assert mesh.prefill.requests[-1].model == MODEL


async def test_model_that_a_default_fills_in_is_named_in_the_answer(
    mesh: FakeMesh, tmp_path: Path
) -> None:
    async with ruled(mesh, tmp_path / "rules.yaml", f"[{{default: {{model: {MODEL}}}}}]") as http:
        response = await http.post(CHAT, json={"messages": chat()["messages"]})

    assert response.json()["model"] == MODEL
    assert response.headers[ACTIONS] == "default:model"


async def test_rules_apply_to_tokenize_and_detokenize(mesh: FakeMesh, tmp_path: Path) -> None:
    rules = f"[{{when: {{route: [tokenize, detokenize]}}, rewrite_model: {{gpt-4o: {MODEL}}}}}]"
    async with ruled(mesh, tmp_path / "rules.yaml", rules) as http:
        encoded = await http.post("/tokenize", json={"model": "gpt-4o", "prompt": "hi"})
        decoded = await http.post("/detokenize", json={"model": "gpt-4o", "tokens": [104, 105]})
        elsewhere = await http.post(CHAT, json=chat() | {"model": "gpt-4o"})

    assert encoded.json()["tokens"] == [104, 105]
    assert decoded.json() == {"prompt": "hi"}
    for response in (encoded, decoded):
        assert response.headers[ACTIONS] == f"rewrite_model:{MODEL}"
    assert elsewhere.status_code == 404
    assert ACTIONS not in elsewhere.headers


@pytest.mark.parametrize(
    ("rule", "status", "kind", "code", "param"),
    [
        ("reject: no", 400, "invalid_request_error", None, None),
        (
            "reject: {message: no, status: 403, code: forbidden, param: n}",
            403,
            "invalid_request_error",
            "forbidden",
            "n",
        ),
        ("reject: {message: no, status: 429}", 429, "rate_limit_error", None, None),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, chat()), (CHAT, chat(stream=True)), ("/tokenize", {"prompt": "hi"})],
)
async def test_rejection_is_an_error_in_the_rules_words(
    mesh: FakeMesh,
    tmp_path: Path,
    path: str,
    body: dict[str, Any],
    rule: str,
    status: int,
    kind: str,
    code: str | None,
    param: str | None,
) -> None:
    async with ruled(mesh, tmp_path / "rules.yaml", f"[{{name: never, {rule}}}]") as http:
        response = await http.post(path, json=body)

    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "error": {"message": "no", "type": kind, "param": param, "code": code}
    }
    assert response.headers[ACTIONS] == "reject:never"
    assert response.headers["x-request-id"]
    assert mesh.tokenizer.num_encodes == 0


async def test_rejection_sees_the_body_as_it_would_be_forwarded(
    mesh: FakeMesh, tmp_path: Path
) -> None:
    rules = "[{clamp: {n: {max: 2}}}, {reject: {message: no, if: {path: n, gt: 2}}}]"
    async with ruled(mesh, tmp_path / "rules.yaml", rules) as http:
        response = await http.post(CHAT, json=chat(n=5))

    assert len(response.json()["choices"]) == 2


async def test_actions_are_told_on_streams(mesh: FakeMesh, tmp_path: Path) -> None:
    async with (
        ruled(mesh, tmp_path / "rules.yaml", "[{default: {temperature: 0.5}}]") as http,
        http.stream("POST", CHAT, json=chat(stream=True)) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers[ACTIONS] == "default:temperature"
        assert (await response.aread()).endswith(b"data: [DONE]\n\n")


async def test_actions_are_told_on_errors(mesh: FakeMesh, tmp_path: Path) -> None:
    async with ruled(mesh, tmp_path / "rules.yaml", "[{default: {temperature: 0.5}}]") as http:
        invalid = await http.post(CHAT, json=chat(top_p=7))
        mesh.scheduler.error = WorkerUnavailable("none")
        failed = await http.post(CHAT, json=chat(stream=True))

    assert (invalid.status_code, failed.status_code) == (400, 503)
    assert invalid.headers[ACTIONS] == failed.headers[ACTIONS] == "default:temperature"


async def test_actions_are_an_attribute_of_the_root_span(
    mesh: FakeMesh, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with ruled(mesh, tmp_path / "rules.yaml", "[{drop: user}, {reject: no}]") as http:
        await http.post(CHAT, json=chat(user="ada"))

    [span] = [span for span in spans.get_finished_spans() if span.name == "gateway.request"]
    assert dict(span.attributes or {})["pdmesh.param_actions"] == "drop:user, reject:rule-2"


@pytest.mark.parametrize(
    "body", ["[]", '"hi"', "null", "", '{"model": "m",', '{"n": 1, "n": 2}', '{"n": NaN}']
)
async def test_body_that_is_no_plain_object_is_refused_before_rules(
    mesh: FakeMesh, tmp_path: Path, body: str
) -> None:
    # GW-08, GW-10
    async with ruled(mesh, tmp_path / "rules.yaml", "[{default: {n: 2}}]") as http:
        response = await http.post(CHAT, content=body, headers={"content-type": "application/json"})

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert ACTIONS not in response.headers


async def test_changed_file_is_in_force_soon_unless_it_is_invalid(
    mesh: FakeMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rules.yaml"
    async with ruled(mesh, path, "[{default: {max_tokens: 3}}]") as http:
        await http.post(CHAT, json=chat())
        assert sampling(mesh).max_tokens == 3

        write(path, "[{default: {max_tokens: 4}}]")
        while sampling(mesh).max_tokens != 4:
            await http.post(CHAT, json=chat())

        caplog.clear()
        write(path, "[{defualt: {max_tokens: 5}}]")
        await eventually(lambda: [one for one in caplog.records if one.levelno >= logging.ERROR])
        response = await http.post(CHAT, json=chat())
        assert response.status_code == 200
        assert sampling(mesh).max_tokens == 4
