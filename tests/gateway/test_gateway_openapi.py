"""/openapi.json is a valid document, complete, and true of what is answered."""

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from gateway.app import build_app
from gateway.keys.model import Limits
from gateway.limits.headers import RATE_LIMIT_HEADERS
from gateway.openai.chat import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.document import openapi_document
from tests.gateway.fake_workers import Fault
from tests.gateway.fakes import FakeMesh
from tests.gateway.keyed import add_key, bearer
from tests.gateway.running import RunningGateway, chat, completion, events, run_gateway

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DOCUMENT: dict[str, Any] = json.loads(openapi_document())


def check(schema: str, value: Any) -> None:
    """Raise unless `value` is what the document calls `schema`."""
    root = {"$ref": f"#/components/schemas/{schema}", "components": DOCUMENT["components"]}
    jsonschema.validate(value, root, cls=jsonschema.Draft202012Validator)


async def test_document_is_openapi_3_1(http: httpx.AsyncClient) -> None:
    response = await http.get("/openapi.json")

    assert response.headers["content-type"] == "application/json"
    assert response.json() == DOCUMENT
    OpenAPIV31SpecValidator(DOCUMENT).validate()


async def test_every_route_is_described(gateway: RunningGateway) -> None:
    routes = {
        getattr(route, "path", "").replace("{name:path}", "{model}")
        for route in build_app(gateway.core).routes
    }

    assert {path for path in routes if not path.startswith("/dashboard")} == set(DOCUMENT["paths"])


def test_every_parameter_that_is_read_is_described() -> None:
    for kind in (ChatRequest, CompletionRequest):
        properties = DOCUMENT["components"]["schemas"][kind.__name__]["properties"]
        assert set(properties) == set(kind.model_fields)
        # A schema that says nothing would allow everything.
        assert all(set(schema) - {"title", "default"} for schema in properties.values())


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        (CHAT, "ChatCompletion", chat(logprobs=True, top_logprobs=2, service_tier="auto")),
        (CHAT, "ChatCompletion", chat(n=2)),
        (COMPLETIONS, "Completion", completion(echo=True, logprobs=2)),
        (COMPLETIONS, "Completion", completion(["a", "b"])),
    ],
)
async def test_answers_and_chunks_are_as_described(
    http: httpx.AsyncClient, path: str, name: str, body: dict[str, Any]
) -> None:
    check(name, (await http.post(path, json=body)).json())

    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, done = await events(http, path, body | {"stream": True, "stream_options": options})
    assert done == "[DONE]"
    for chunk in chunks:
        check(f"{name}Chunk", chunk)


async def test_an_error_in_a_stream_is_as_described(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.tokenizer.error_from = mesh.tokenizer.num_answers + 3
    *chunks, error, _ = await events(http, CHAT, chat(stream=True))

    assert chunks
    check("Error", error)


async def test_errors_before_an_answer_are_as_described(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.prefill.faults = [Fault(error=RuntimeError("bug"))]
    responses = [
        await http.post(CHAT, json=chat()),
        await http.post(CHAT, json={}),
        await http.post(CHAT, json=chat(model="x")),
        await http.get(CHAT),
        await http.get("/nowhere"),
        await http.post(CHAT, content="x", headers={"content-type": "text/plain"}),
    ]

    assert [one.status_code for one in responses] == [500, 400, 404, 405, 404, 415]
    for response in responses:
        check("Error", response.json())
        assert response.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/models", "/live", "/health", "/openapi.json"])
async def test_other_answers_are_as_described(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(path)

    answers = DOCUMENT["paths"][path]["get"]["responses"]
    schema = answers[str(response.status_code)]["content"]["application/json"]["schema"]
    root = schema | {"components": DOCUMENT["components"]}
    jsonschema.validate(response.json(), root, cls=jsonschema.Draft202012Validator)


# HTTP's own, and those that are for proxies.
PLAIN_HEADERS = {
    "cache-control",
    "connection",
    "content-length",
    "content-type",
    "date",
    "transfer-encoding",
    "x-accel-buffering",
}


def check_headers(response: httpx.Response, path: str) -> set[str]:
    """Raise unless the answer's headers are those that the document has; returns their names."""
    [operation] = DOCUMENT["paths"][path].values()
    described = operation["responses"].get(str(response.status_code))
    described = described or operation["responses"]["default"]
    if "$ref" in described:
        described = DOCUMENT["components"]["responses"][described["$ref"].rpartition("/")[2]]
    headers = {
        name: DOCUMENT["components"]["headers"][header["$ref"].rpartition("/")[2]]
        for name, header in described["headers"].items()
    }
    sent = set(response.headers) - PLAIN_HEADERS
    assert sent <= set(headers)
    assert {name for name, header in headers.items() if header.get("required")} <= sent
    for name in sent:
        jsonschema.validate(response.headers[name], headers[name]["schema"])
    return sent


async def test_headers_are_as_described(mesh: FakeMesh, tmp_path: Path) -> None:
    keys, rules = tmp_path / "keys.json", tmp_path / "rules.yaml"
    key = add_key(keys, "ada", limits=Limits(requests_per_minute=5, tokens_per_minute=2000))
    rules.write_text("rules: [{clamp: {max_tokens: {max: 3}}}]")
    seen: dict[int, set[str]] = {}
    async with (
        run_gateway(mesh, keys_path=keys, rules_path=rules) as gateway,
        httpx.AsyncClient(base_url=gateway.url, headers=bearer(key)) as http,
    ):

        async def ask(path: str, body: Any = None, **options: Any) -> None:
            response = await http.request("GET" if body is None else "POST", path, **options)
            names = check_headers(response, path)
            seen[response.status_code] = seen.get(response.status_code, set()) | names

        async def post(path: str, body: Any, **options: Any) -> None:
            await ask(path, body, json=body, **options)

        await post(CHAT, chat(max_tokens=9))
        await post(COMPLETIONS, completion(max_tokens=9, stream=True))
        await post("/tokenize", {"prompt": "hi"})
        await post(CHAT, chat(), headers=bearer("wrong"))
        await post(CHAT, chat(model="x"))
        await post(CHAT, chat(temperature=9))
        for _ in range(3):
            await post(CHAT, chat())
        for path in ("/v1/models", "/health", "/live", "/openapi.json", "/metrics"):
            await ask(path)
        await ask(CHAT)

    limits = set(RATE_LIMIT_HEADERS)
    assert seen[200] == limits | {"x-request-id", "server-timing", "x-pdmesh-param-actions"}
    assert seen[401] == {"x-request-id", "www-authenticate"}
    assert seen[404] == {"x-request-id"}
    assert seen[400] == limits | {"x-request-id"}
    assert seen[405] == {"x-request-id", "allow"}
    assert seen[429] == limits | {"x-request-id", "retry-after"}
