"""The HTTP surface: every URL that the gateway answers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.core import Core
from gateway.dashboard.routes import dashboard_routes
from gateway.errors import OK, UNHEALTHY, envelope
from gateway.generate_endpoint import GenerateEndpoint
from gateway.generation import Deadline
from gateway.keys.access import caller_of
from gateway.middleware import ANSWER_HEADERS
from gateway.openai.chat import CHAT_API
from gateway.openai.completions import COMPLETIONS_API
from gateway.openai.document import openapi_document
from gateway.openai.models import model_list, model_object
from gateway.openai.responses import Detokenized, Live
from gateway.openai.tokenize import parse_detokenize, parse_tokenize, tokenize_answer
from gateway.param_rules import read_ruled
from mesh import metrics
from mesh.errors import InvalidRequest
from mesh.v1 import tokenizer_pb2

# Whoever counts wants to know by how much a text is too long for the window; encoding takes some
# hundreds of bytes a token.
_MAX_TOKENIZED = 1 << 18


def build_routes(core: Core) -> list[Route]:
    """All routes."""
    plain = _PlainRoutes(core)
    return [
        Route("/v1/chat/completions", GenerateEndpoint(core, CHAT_API), methods=["POST"]),
        Route("/v1/completions", GenerateEndpoint(core, COMPLETIONS_API), methods=["POST"]),
        Route("/v1/models", plain.list_models, methods=["GET"]),
        # Model names may hold slashes.
        Route("/v1/models/{name:path}", plain.get_model, methods=["GET"]),
        Route("/tokenize", plain.tokenize, methods=["POST"]),
        Route("/detokenize", plain.detokenize, methods=["POST"]),
        Route("/live", plain.live, methods=["GET"]),
        Route("/health", plain.health, methods=["GET"]),
        Route("/metrics", plain.metrics, methods=["GET"]),
        Route("/openapi.json", plain.openapi, methods=["GET"]),
        *dashboard_routes(core),
    ]


class _PlainRoutes:
    """Everything but generation."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def list_models(self, request: Request) -> Response:
        return JSONResponse(model_list(await self._core.catalog.all(caller_of(request.scope))))

    async def get_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        model = await self._core.catalog.get(name, caller_of(request.scope))
        return JSONResponse(model_object(model))

    async def tokenize(self, request: Request) -> Response:
        async with self._admitted(request):
            return await self._tokenize(request)

    async def detokenize(self, request: Request) -> Response:
        async with self._admitted(request):
            return await self._detokenize(request)

    async def _tokenize(self, request: Request) -> Response:
        parsed = parse_tokenize(await self._read_object(request))
        model = await self._model(request, parsed.model)
        deadline = Deadline(self._core.config.encode_timeout_s)
        encoded = await self._core.tokenizer.encode(
            model.name,
            parsed.to_prompt(),
            deadline,
            max_prompt_tokens=max(model.max_model_len, _MAX_TOKENIZED),
        )
        token_bytes = None
        if parsed.return_token_strs:
            decoded = await self._core.tokenizer.decode(
                model.name, encoded.token_ids, deadline, return_token_bytes=True
            )
            token_bytes = decoded.token_bytes
        return JSONResponse(tokenize_answer(encoded.token_ids, model, token_bytes))

    async def _detokenize(self, request: Request) -> Response:
        parsed = parse_detokenize(await self._read_object(request))
        model = await self._model(request, parsed.model)
        if not all(token_id < model.vocab_size for token_id in parsed.tokens):
            raise InvalidRequest(
                f"tokens holds an id outside the vocabulary of {model.vocab_size}", param="tokens"
            )
        deadline = Deadline(self._core.config.encode_timeout_s)
        decoded = await self._core.tokenizer.decode(model.name, parsed.tokens, deadline)
        answer: Detokenized = {"prompt": decoded.text}
        return JSONResponse(answer)

    async def live(self, request: Request) -> Response:
        """The process answers; whether the mesh does is `health`'s business."""
        answer: Live = {"status": "ok"}
        return JSONResponse(answer)

    async def openapi(self, request: Request) -> Response:
        return Response(openapi_document(), media_type="application/json")

    async def health(self, request: Request) -> Response:
        report = self._core.health.report()
        if not report["problems"]:
            return JSONResponse(report, OK)
        error = envelope("; ".join(report["problems"]), type="service_unavailable_error")
        return JSONResponse(report | error, UNHEALTHY)

    async def metrics(self, request: Request) -> Response:
        body, content_type = metrics.render()
        return Response(body, media_type=content_type)

    async def _read_object(self, request: Request) -> dict[str, object]:
        body = await self._core.read_body(request.headers, request.receive)
        return read_ruled(self._core.rules.current(), request.scope, body).payload

    async def _model(self, request: Request, name: str | None) -> tokenizer_pb2.ModelInfo:
        caller = caller_of(request.scope)
        if name is None:
            return await self._core.catalog.default(caller)
        return await self._core.catalog.get(name, caller)

    @asynccontextmanager
    async def _admitted(self, request: Request) -> AsyncIterator[None]:
        """Counts as a request, of no tokens: none is generated."""
        async with self._core.limits.admitted(caller_of(request.scope), 0) as admission:
            request.scope[ANSWER_HEADERS] = admission.headers
            yield
