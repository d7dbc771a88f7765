"""Requests of both endpoints, and what is said of those that are refused."""

from typing import Any

import httpx

from mesh.v1 import types_pb2
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, completion

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
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
