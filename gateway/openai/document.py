"""/openapi.json: the REST API as OpenAPI 3.1, from the schemas that validate and build."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

import orjson
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from gateway.errors import (
    ERROR_STATUSES,
    METHOD_NOT_ALLOWED,
    UNAUTHENTICATED,
    UNHEALTHY,
)
from gateway.limits.headers import RATE_LIMIT_HEADERS
from gateway.openai import responses
from gateway.openai.chat import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from gateway.openai.unsupported import CHAT, COMPLETIONS

Schema = dict[str, Any]

_REF = "#/components/schemas/{model}"
_JSON = "application/json"

_REQUESTS = (
    ChatRequest,
    CompletionRequest,
    TokenizeTextRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
)
_RESPONSES = (
    responses.ChatCompletion,
    responses.ChatCompletionChunk,
    responses.Completion,
    responses.CompletionChunk,
    responses.Model,
    responses.ModelList,
    responses.Tokenized,
    responses.Detokenized,
    responses.Live,
    responses.Health,
    responses.Unhealthy,
    responses.Error,
)


@cache
def openapi_document() -> bytes:
    """The document; the same for the life of the process."""
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "pdmesh",
                "version": version("pdmesh"),
                "description": "OpenAI's REST API, served by a mesh of prefill and decode workers.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            # Where the document itself comes from.
            "servers": [{"url": "/"}],
            "security": [{}, {"key": []}],
            "paths": _paths(),
            "components": {
                "schemas": _schemas(),
                "headers": _HEADERS,
                "responses": _error_responses(),
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _schemas() -> Schema:
    inputs: list[tuple[type, JsonSchemaMode]] = [(kind, "validation") for kind in _REQUESTS]
    outputs: list[tuple[type, JsonSchemaMode]] = [(kind, "serialization") for kind in _RESPONSES]
    _, made = TypeAdapter.json_schemas(
        [(kind.__name__, mode, TypeAdapter(kind)) for kind, mode in inputs + outputs],
        ref_template=_REF,
    )
    schemas: Schema = made["$defs"]
    return schemas


# Those of the failures that say more than the others.
_ERRORS = {UNAUTHENTICATED: "Unauthenticated", METHOD_NOT_ALLOWED: "MethodNotAllowed"}

_HEADERS = {
    "RequestId": {
        "description": "The request's id: the client's own, if it sent a sane one.",
        "required": True,
        "schema": {"type": "string"},
    },
    "RetryAfter": {
        "description": "Seconds after which another try may succeed.",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "ServerTiming": {
        "description": "The stages of the request, in milliseconds.",
        "schema": {"type": "string"},
    },
    "ParamActions": {
        "description": "What the operator's rules did to the request, if anything.",
        "schema": {"type": "string"},
    },
    "RateLimit": {
        "description": "A limit of the caller's key, if it has one: the tightest of its kind.",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "RateLimitReset": {
        "description": "When all of it is there again, such as 6m0s, 1.5s or 20ms.",
        "schema": {"type": "string", "pattern": "^([0-9]+m)?[0-9.]+(s|ms)$"},
    },
    "Allow": {
        "description": "The methods that this URL takes.",
        "required": True,
        "schema": {"type": "string"},
    },
    "WwwAuthenticate": {
        "description": "How to authenticate.",
        "required": True,
        "schema": {"type": "string", "const": "Bearer"},
    },
}


def _paths() -> Schema:
    return {
        "/v1/chat/completions": {
            "post": _generation("Answer a chat", "ChatRequest", "ChatCompletion", CHAT)
        },
        "/v1/completions": {
            "post": _generation("Continue a text", "CompletionRequest", "Completion", COMPLETIONS)
        },
        "/v1/models": {"get": _get("List the models that are served", "ModelList")},
        "/v1/models/{model}": {
            "get": _get("Describe a model", "Model")
            | {
                "parameters": [
                    {
                        "name": "model",
                        "in": "path",
                        "required": True,
                        "description": "Its name, which may hold slashes.",
                        "schema": {"type": "string", "minLength": 1},
                    }
                ]
            }
        },
        "/tokenize": {
            "post": _post(
                "Turn a text or messages into ids",
                {"anyOf": [_ref("TokenizeTextRequest"), _ref("TokenizeChatRequest")]},
                {"200": _answer("The ids.", "Tokenized")},
            )
        },
        "/detokenize": {
            "post": _post(
                "Turn ids into text",
                _ref("DetokenizeRequest"),
                {"200": _answer("The text.", "Detokenized")},
            )
        },
        "/live": {"get": _get("Whether the process answers", "Live")},
        "/health": {"get": _health()},
        "/metrics": {"get": _text("Metrics in Prometheus' text format", "text/plain")},
        "/openapi.json": {"get": _get("This document", None)},
    }


def _generation(summary: str, request: str, answer: str, unsupported: Mapping[str, object]) -> Any:
    chunk = f"{answer}Chunk"
    # Of one event, as OpenAPI 3.2's `itemSchema` has it.
    stream = {
        "schema": {
            "type": "object",
            "description": (
                "With `stream`: server-sent events whose data is a chunk, or an error where "
                "the generation failed half-way, and `[DONE]` at the end. Comments keep a "
                "connection alive while there is nothing to say."
            ),
            "properties": {
                "data": {
                    "type": "string",
                    "contentMediaType": _JSON,
                    "contentSchema": {"anyOf": [_ref(chunk), _ref("Error"), {"const": "[DONE]"}]},
                }
            },
            "required": ["data"],
        }
    }
    done = _answer("The answer, whole or as a stream.", answer)
    done["content"]["text/event-stream"] = stream
    done["headers"]["server-timing"] = _header("ServerTiming")
    names = ", ".join(f"`{name}`" for name in sorted(unsupported))
    description = (
        "Unknown keys are ignored. These are known and refused with `unsupported_parameter` "
        f"unless their value switches them off: {names}."
    )
    return _post(summary, _ref(request), {"200": done}) | {"description": description}


def _post(summary: str, request: Schema, answers: Schema) -> Schema:
    for answer in answers.values():
        answer["headers"] |= _rate_limits()
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {_JSON: {"schema": request}}},
        "responses": answers | _errors(),
    }


def _get(summary: str, answer: str | None) -> Schema:
    return {"summary": summary, "responses": {"200": _answer(summary, answer)} | _errors()}


def _text(summary: str, media_type: str) -> Schema:
    answer = _answer(summary, None) | {"content": {media_type: {"schema": {"type": "string"}}}}
    return {"summary": summary, "responses": {"200": answer} | _errors()}


def _health() -> Schema:
    operation = _get("Whether requests can be served and make progress", "Health")
    operation["responses"][str(UNHEALTHY)] = _answer("They cannot; why.", "Unhealthy")
    return operation


def _errors() -> Schema:
    """All that can go wrong, and what an operator's rules may answer."""
    names = {str(status): _ERRORS.get(status, "Error") for status in ERROR_STATUSES}
    return {
        status: {"$ref": f"#/components/responses/{name}"}
        for status, name in {**names, "default": "Error"}.items()
    }


def _error_responses() -> Schema:
    made = {name: _error() for name in ("Error", *_ERRORS.values())}
    made["Unauthenticated"]["headers"]["www-authenticate"] = _header("WwwAuthenticate")
    made["MethodNotAllowed"]["headers"]["allow"] = _header("Allow")
    return made


def _error() -> Schema:
    made = _answer("The request failed.", "Error")
    # It may have been admitted before it failed.
    made["headers"] |= {"retry-after": _header("RetryAfter"), **_rate_limits()}
    return made


def _rate_limits() -> Schema:
    return {
        name: _header("RateLimitReset" if "reset" in name else "RateLimit")
        for name in RATE_LIMIT_HEADERS
    }


def _header(name: str) -> Schema:
    return {"$ref": f"#/components/headers/{name}"}


def _answer(description: str, schema: str | None) -> Schema:
    return {
        "description": description,
        "headers": {
            "x-request-id": _header("RequestId"),
            "x-pdmesh-param-actions": _header("ParamActions"),
        },
        "content": {_JSON: {"schema": {"type": "object"} if schema is None else _ref(schema)}},
    }


def _ref(schema: str) -> Schema:
    return {"$ref": _REF.format(model=schema)}
