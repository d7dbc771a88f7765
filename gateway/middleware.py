"""What every HTTP request gets: an id, an answer, an end when its client leaves."""

import asyncio
import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import to_answer
from gateway.param_rules import PARAM_ACTIONS
from gateway.rules.engine import ACTIONS_HEADER
from mesh.telemetry import request_id_var

logger = logging.getLogger(__name__)

# Where the ASGI scope keeps the id that the client sent, if it sent a sane one.
CLIENT_REQUEST_ID = "pdmesh.client_request_id"

# Where the ASGI scope keeps headers for the answer, whatever the answer becomes.
ANSWER_HEADERS = "pdmesh.answer_headers"

_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIdMiddleware:
    """Gives each request an id of its own and answers with the client's, if that is sane.

    Clients reuse their ids, so ours alone goes into the mesh. Every answer also says what
    rules did to the request and what is left of its caller's limits. And this is the last
    resort: no failure leaves here without an answer in OpenAI's form.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        request_id_var.set(request_id)
        given = Headers(scope=scope).get("x-request-id", "")
        answered_id = given if _SANE_ID.fullmatch(given) else request_id
        has_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = answered_id
                if actions := scope.get(PARAM_ACTIONS):
                    headers[ACTIONS_HEADER] = actions
                headers.update(scope.get(ANSWER_HEADERS, {}))
            await send(message)

        if answered_id != request_id:
            scope[CLIENT_REQUEST_ID] = answered_id
        try:
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnect:
            # Nobody is left to answer.
            return
        except Exception as error:
            logger.exception("unhandled error")
            if has_started:
                # A cut connection is all that can still tell the client.
                raise
            answer = to_answer(error)
            response = JSONResponse(answer.body, answer.status, answer.headers)
            await response(scope, receive, send_with_headers)


class DisconnectMiddleware:
    """Cancels the handler as soon as its client is gone, streaming or not.

    Once the handler has read the body, the next message can only be the disconnect. Behind a whole
    answer servers say it of every client: that ends nothing.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_body = asyncio.Event()
        handling = asyncio.current_task()
        assert handling is not None, "servers handle each request in a task"
        is_gone = False

        async def receive_body() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                has_body.set()
            return message

        async def cancel_when_gone() -> None:
            nonlocal is_gone
            await has_body.wait()
            while (await receive())["type"] != "http.disconnect":
                pass
            is_gone = True
            handling.cancel()

        async def send_answer(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                watching.cancel()
            await send(message)

        watching = asyncio.create_task(cancel_when_gone())
        try:
            await self._app(scope, receive_body, send_answer)
        except asyncio.CancelledError:
            # Somebody else's goes on.
            if not is_gone or handling.uncancel() > 0:
                raise
        finally:
            watching.cancel()
