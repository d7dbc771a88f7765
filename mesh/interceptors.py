"""What every RPC gets on the server: request id, trace context, errors, access log."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, Never

import grpc
from grpc_status import rpc_status

from mesh.errors import MeshError, from_rpc_error
from mesh.telemetry import Stopwatch, enter_trace, request_id_var

logger = logging.getLogger(__name__)

INTERNAL_MESSAGE = "internal error"

_MAX_REQUEST_ID_CHARS = 128

# grpc's handler and context types are generic over messages that we never look at.
_Behavior = Callable[[Any, Any], Any]
_Run = Callable[[Any, Any], Awaitable[Any]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Runs each handler inside its caller's context and answers every failure.

    A raised MeshError goes out with its own status; anything else, a stray
    CancelledError included, as INTERNAL with a fixed message. Handlers' `finally`
    blocks run in the RPC's own task, at once, when the caller goes away.
    """

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        # grpc.aio runs interceptors and handler in one task, made for this RPC.
        enter_call(handler_call_details.invocation_metadata or ())
        return guard(handler, handler_call_details.method)


def enter_call(metadata: Any) -> None:
    """Take over the caller's request id and trace, for the rest of the running task."""
    headers = [(key, value) for key, value in metadata if isinstance(value, str)]
    enter_trace(headers)
    request_id = next((value for key, value in headers if key == "x-request-id"), "")
    request_id_var.set(request_id[:_MAX_REQUEST_ID_CHARS])


def guard(
    handler: "grpc.RpcMethodHandler[Any, Any]", method: str
) -> "grpc.RpcMethodHandler[Any, Any]":
    """The handler with every failure answered and every call in the access log."""
    behavior: Any
    if handler.request_streaming and handler.response_streaming:
        behavior, make = handler.stream_stream, grpc.stream_stream_rpc_method_handler
    elif handler.request_streaming:
        behavior, make = handler.stream_unary, grpc.stream_unary_rpc_method_handler
    elif handler.response_streaming:
        behavior, make = handler.unary_stream, grpc.unary_stream_rpc_method_handler
    else:
        behavior, make = handler.unary_unary, grpc.unary_unary_rpc_method_handler
    run = _stream(behavior) if handler.response_streaming else _unary(behavior)
    made: Any = make
    return made(  # type: ignore[no-any-return]
        _answering(run, method), handler.request_deserializer, handler.response_serializer
    )


def _unary(behavior: _Behavior) -> _Run:
    async def run(request: Any, context: Any) -> Any:
        return await behavior(request, context)

    return run


def _stream(behavior: _Behavior) -> _Run:
    """Drive a generator handler from here instead of from inside grpc.

    A generator handed to grpc is closed by the garbage collector when the caller
    goes away during a write; `aclosing` runs its `finally` at once.
    """

    async def run(request: Any, context: Any) -> None:
        result = behavior(request, context)
        if inspect.isawaitable(result):
            await result
            return
        async with aclosing(result) as responses:
            async for response in responses:
                await context.write(response)

    return run


def _answering(run: _Run, method: str) -> _Run:
    async def answering(request: Any, context: Any) -> Any:
        stopwatch = Stopwatch()
        outcome = "OK"
        try:
            # Headers at once: they tell the caller's channel that the call was
            # accepted, so that it is never sent a second time.
            await context.send_initial_metadata(())
            return await run(request, context)
        except asyncio.CancelledError as error:
            if _is_cancelled():
                outcome = "CANCELLED"
                raise
            outcome = "INTERNAL"
            await _abort(context, error, method)
        except (grpc.aio.AbortError, grpc.aio.InternalError):
            # A handler's own abort, or a write to a caller that is gone.
            outcome = "ABORTED"
            raise
        except Exception as error:
            outcome = type(error).__name__
            await _abort(context, error, method)
        finally:
            _log_access(method, outcome, stopwatch)

    return answering


def _is_cancelled() -> bool:
    """Whether grpc cancelled this RPC, rather than the handler raising CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _abort(context: Any, error: BaseException, method: str) -> Never:
    if _is_cancelled():
        # Nobody is left to tell; but a clean-up that fails is still a bug.
        if not isinstance(error, MeshError):
            logger.error("error while being cancelled", exc_info=error, extra={"rpc": method})
        raise asyncio.CancelledError from error
    if isinstance(error, grpc.aio.AioRpcError):
        # An error of the next hop that the handler let through keeps its meaning.
        error = from_rpc_error(error)
    if isinstance(error, MeshError):
        status: Any = rpc_status.to_status(error.to_status())
        await context.abort(status.code, status.details, status.trailing_metadata)
    logger.error("unhandled error", exc_info=error, extra={"rpc": method})
    # The message may hold internals, so the caller learns only that we failed.
    await context.abort(grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE)
    raise AssertionError("abort returned")


def _log_access(method: str, outcome: str, stopwatch: Stopwatch) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "rpc finished",
            extra={
                "rpc": method,
                "outcome": outcome,
                "duration_ms": round(stopwatch.elapsed_ms, 3),
            },
        )
