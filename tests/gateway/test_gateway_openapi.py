"""/openapi.json is a valid document, complete, and true of what is answered."""

import json
from typing import Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from gateway.app import build_app
from gateway.openai.chat import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.document import openapi_document
from tests.gateway.fake_workers import Fault
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import RunningGateway, chat, completion, events

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
