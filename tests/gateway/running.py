"""A gateway for tests, and what tests say to it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from gateway.app import RestServer
from gateway.config import GatewayConfig
from gateway.core import Core, open_core
from gateway.inference import InferenceServicer
from mesh.server import MeshServer
from mesh.v1 import inference_pb2_grpc
from tests.gateway.fake_tokenizer import MODEL
from tests.gateway.fakes import FakeMesh


@dataclass(frozen=True)
class RunningGateway:
    core: Core
    rest: RestServer
    address: str
    grpc_address: str

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@asynccontextmanager
async def run_gateway(mesh: FakeMesh, **settings: Any) -> AsyncIterator[RunningGateway]:
    """The real app behind the real uvicorn, and InferenceService beside it."""
    config = GatewayConfig(
        **{
            "port": 0,
            "tokenizer_addresses": [mesh.tokenizer_address],
            "scheduler_addresses": [mesh.scheduler_address],
            "health_interval_s": 0.1,
            **settings,
        }
    )
    async with open_core(config) as core:
        rest = RestServer(core)
        server = MeshServer()
        server.add(
            inference_pb2_grpc.add_InferenceServiceServicer_to_server,
            InferenceServicer(core),
            "mesh.v1.InferenceService",
        )
        grpc_address = await server.start()
        try:
            yield RunningGateway(core, rest, await rest.start(), grpc_address)
        finally:
            await rest.stop()
            await server.stop(0)


async def eventually(is_so: Callable[[], object]) -> None:
    """Return when something that tells nobody has come true; time limits bound the wait."""
    while True:
        if is_so():
            return
        await asyncio.sleep(0.005)


def chat(content: str = "hi", **more: Any) -> dict[str, Any]:
    """A chat body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}


def completion(prompt: Any = "hi", **more: Any) -> dict[str, Any]:
    """A completion body."""
    return {"model": MODEL, "prompt": prompt, **more}


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The payloads of a whole stream, `[DONE]` as that string."""
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        text = (await response.aread()).decode()
    return parse_events(text)


def parse_events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    payloads: list[Any] = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        data = block.removeprefix("data: ")
        assert data != block, block
        payloads.append(data if data == "[DONE]" else json.loads(data))
    return payloads


def text_of(payloads: list[Any], index: int = 0) -> str:
    """The text of one choice, from the chunks of either API."""
    parts = []
    for payload in payloads:
        if payload == "[DONE]" or "choices" not in payload:
            continue
        for choice in payload["choices"]:
            if choice["index"] == index:
                parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(parts)
