"""Who may ask for what over HTTP: nothing passes without a key, where keys are needed."""

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import NotAdmin, to_answer
from gateway.keys.model import ANYONE, Caller
from gateway.keys.ring import KeyRing
from mesh import metrics
from mesh.errors import MeshError

# Where the ASGI scope keeps who sent the request.
_CALLER = "pdmesh.caller"

# Probes have no keys, and learn nothing.
_OPEN = ("/live", "/health")
# About the whole mesh, not about the caller.
_ADMIN = ("/metrics",)
# Knows its callers itself: a browser sends no Authorization header.
_DASHBOARD = "/dashboard"


class KeyMiddleware:
    """Answers 401 before a byte of the body is read; else the caller is known behind it."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope[_CALLER] = self._caller(scope)
            except MeshError as error:
                answer = to_answer(error)
                response = JSONResponse(answer.body, answer.status, answer.headers)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        path: str = scope["path"]
        if path in _OPEN or path == _DASHBOARD or path.startswith(f"{_DASHBOARD}/"):
            return ANYONE
        caller = self._keys.authenticate(Headers(scope=scope).getlist("authorization"))
        if path in _ADMIN and self._keys.is_required and not caller.is_admin:
            metrics.REFUSALS.add(1, {"reason": "not_admin"})
            raise NotAdmin("this needs an admin key")
        return caller


def caller_of(scope: Scope) -> Caller:
    """Who sent the request."""
    caller: Caller = scope.get(_CALLER, ANYONE)
    return caller
