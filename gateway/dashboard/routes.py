"""/dashboard: the page, and the JSON that it and the commands read."""

from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from gateway.core import Core
from gateway.dashboard.access import COOKIE, check_access, given_key
from gateway.dashboard.live import live
from gateway.dashboard.prefixes import Divergence
from gateway.errors import NOT_FOUND
from gateway.generation import Deadline

_STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_MAX_LISTED = 1000

Handler = Callable[[Request], Awaitable[Response]]


def dashboard_routes(core: Core) -> list[Route]:
    """All of them behind the same check."""
    pages = _Dashboard(core)
    return [
        Route(f"/dashboard{path}", pages.guarded(handler), methods=["GET"])
        for path, handler in (
            ("", pages.page),
            ("/style.css", pages.style),
            ("/app.js", pages.script),
            ("/api/live", pages.live),
            ("/api/prefixes", pages.prefixes),
            ("/api/requests", pages.requests),
            ("/api/requests/{request_id}", pages.request),
        )
    ]


class _Dashboard:
    def __init__(self, core: Core) -> None:
        self._core = core
        key = core.config.dashboard_key
        self._key = key.get_secret_value() if key is not None else None

    def guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            check_access(request, self._key, self._core.keys)
            response = await handler(request)
            response.headers.update(_HEADERS)
            return response

        return guarded

    async def page(self, request: Request) -> Response:
        if self._asks_for_key and "key" in request.query_params:
            # The key leaves the address bar, and the history, for a cookie.
            response: Response = RedirectResponse("/dashboard")
            response.set_cookie(
                COOKIE, given_key(request), httponly=True, samesite="strict", path="/dashboard"
            )
            return response
        return _file("index.html")

    @property
    def _asks_for_key(self) -> bool:
        return self._key is not None or self._core.keys.is_required

    async def style(self, request: Request) -> Response:
        return _file("style.css")

    async def script(self, request: Request) -> Response:
        return _file("app.js")

    async def live(self, request: Request) -> Response:
        return JSONResponse(live(self._core))

    async def prefixes(self, request: Request) -> Response:
        """Where each key's prompts part; the tokens there are all of their text that is told."""
        divergences = self._core.recent.prefixes.divergences()
        return JSONResponse({"prefixes": [await self._prefix(one) for one in divergences]})

    async def requests(self, request: Request) -> Response:
        recent = self._core.recent
        limit = min(_number(request, "limit", _MAX_LISTED), _MAX_LISTED)
        latest = recent.latest(limit, after=_number(request, "after", 0))
        listed = [finished.summary() for finished in latest]
        return JSONResponse({"last_number": recent.last_number, "requests": listed})

    async def request(self, request: Request) -> Response:
        finished = self._core.recent.find(request.path_params["request_id"])
        if finished is None:
            raise HTTPException(NOT_FOUND)
        return JSONResponse(finished.details())

    async def _prefix(self, divergence: Divergence) -> dict[str, Any]:
        async def text(*token_ids: int) -> str:
            deadline = Deadline(self._core.config.encode_timeout_s)
            decoded = await self._core.tokenizer.decode(divergence.model, token_ids, deadline)
            return decoded.text

        return {
            "key": divergence.key,
            "model": divergence.model,
            "num_prompts": divergence.num_prompts,
            "num_prompt_tokens": divergence.num_prompt_tokens,
            "num_shared_tokens": divergence.num_shared_tokens,
            "num_same_after": divergence.num_same_after,
            "shared_text": await text(*divergence.shared_token_ids),
            "next_texts": [await text(one) for one in divergence.next_token_ids],
        }


def _number(request: Request, name: str, default: int) -> int:
    given = request.query_params.get(name, "")
    return int(given) if given.isascii() and given.isdecimal() else default


def _file(name: str) -> Response:
    return Response(_content(name), media_type=_TYPES[Path(name).suffix])


@cache
def _content(name: str) -> bytes:
    return (_STATIC / name).read_bytes()
