"""POST /v1/chat/completions and /v1/completions: one HTTP request, first byte to last."""

import logging
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from gateway.answers import EventStream, WholeAnswer, send_json
from gateway.choices import Choices
from gateway.core import Core
from gateway.errors import to_answer
from gateway.generation import Deadline, Job
from gateway.keys.access import caller_of
from gateway.middleware import ANSWER_HEADERS, CLIENT_REQUEST_ID
from gateway.openai.api import Api, ApiRequest
from gateway.param_rules import PARAM_ACTIONS, read_ruled
from gateway.record import RequestRecord
from gateway.service_class import ttft_objective_ms
from mesh.errors import MeshError
from mesh.telemetry import SpanKind, enter_trace, request_id_var, span
from mesh.v1 import types_pb2

logger = logging.getLogger(__name__)


class GenerateEndpoint:
    """An ASGI app rather than a function: one coroutine, and one span, lasts to the last byte."""

    def __init__(self, core: Core, api: Api) -> None:
        self._core = core
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        # Each HTTP request is handled in a task of its own, which keeps this context.
        enter_trace(headers.items())
        record = RequestRecord(
            request_id_var.get(),
            self._api.operation,
            client_request_id=scope.get(CLIENT_REQUEST_ID, ""),
            recent=self._core.recent,
            keeps_content=self._core.config.trace_content,
        )
        record.caller = caller_of(scope)
        with self._core.in_flight.request(), span("gateway.request", kind=SpanKind.SERVER) as root:
            outcome: BaseException | None = None
            try:
                outcome = await self._respond(scope, receive, send, record)
            except BaseException as error:
                # The client is gone, or the process is about to be.
                outcome = error
                raise
            finally:
                record.finish(outcome, root)

    async def _respond(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> Exception | None:
        """Answer, whatever happens; returns the failure that the client was told."""
        caller = record.caller
        deadline = Deadline(self._core.config.request_timeout_s)
        answer: EventStream | WholeAnswer | None = None
        try:
            self._core.in_flight.check_room()
            body = await self._core.read_body(Headers(scope=scope), receive)
            request, answered_model = self._validate(scope, body, record)
            model = await self._core.catalog.get(request.model, caller)
            record.model, record.is_stream = model.name, request.is_stream()
            generation = replace(
                request.generation(model),
                ttft_objective_ms=ttft_objective_ms(Headers(scope=scope)),
                tenant=caller.group,
            )
            async with self._core.admitted(caller, generation, record) as headers:
                scope[ANSWER_HEADERS] = headers
                groups = await self._core.pipeline.prepare(
                    record.request_id, generation, model, deadline, record.timeline
                )
                record.serve(groups)
                answer = self._answer(request, answered_model, record, groups)
                async with Choices(self._core.pipeline, groups).start() as choices:
                    with self._core.in_flight.running(choices):
                        await answer.send(choices, send)
        except ClientDisconnect:
            raise
        except Exception as error:
            if not isinstance(error, MeshError):
                logger.exception("unhandled error")
            record.begin_error()
            await _send_error(error, answer, send)
            return error
        return None

    def _validate(self, scope: Scope, body: bytes, record: RequestRecord) -> tuple[ApiRequest, str]:
        """The request after rules, and the model's name for the answer."""
        record.timeline.enter(types_pb2.STAGE_RULES)
        with span("gateway.rules"):
            try:
                ruled = read_ruled(self._core.rules.current(), scope, body)
            finally:
                record.param_actions = scope.get(PARAM_ACTIONS, "")
            request = self._api.parse(ruled.payload)
        return request, ruled.answered_model(request.model)

    def _answer(
        self, request: ApiRequest, model: str, record: RequestRecord, groups: list[list[Job]]
    ) -> EventStream | WholeAnswer:
        jobs = [job for group in groups for job in group]
        if not request.is_stream():
            return WholeAnswer(self._api, request, model, record, jobs)
        return EventStream(
            self._api,
            request,
            model,
            record,
            jobs,
            header_wait_s=self._core.config.stream_header_wait_s,
            keep_alive_interval_s=self._core.config.keep_alive_interval_s,
        )


async def _send_error(
    error: Exception, answer: EventStream | WholeAnswer | None, send: Send
) -> None:
    if isinstance(answer, EventStream) and answer.has_started:
        await answer.send_error(error, send)
        return
    told = to_answer(error)
    await send_json(send, told.status, told.body, told.headers)
