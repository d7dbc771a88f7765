"""Failures as OpenAI's clients see them; the only file with HTTP status codes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

from gateway.limits.refusal import LimitExceeded
from mesh.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvLeaseExpired,
    KvTransferFailed,
    MeshError,
    MessageTooLarge,
    ModelNotFound,
    QueueFull,
    RateLimited,
    Unauthenticated,
    UnsupportedParameter,
    WorkerUnavailable,
)

OK = 200
# Never sent: the client is gone. The log line of its request says so.
CLIENT_CLOSED_REQUEST = 499
UNHEALTHY = 503

# Refusals made before a request has a body that could be understood.
INVALID_HTTP = 400
UNAUTHENTICATED = 401
NOT_FOUND = 404
METHOD_NOT_ALLOWED = 405
REQUEST_TIMEOUT = 408
TOO_MANY_REQUESTS = 429
HEADERS_TOO_LARGE = 431
OVERLOADED = 503

_DEFAULT_RETRY_AFTER_S = 1.0
_UNAVAILABLE = "No worker can take this request at the moment. Please try again."
_INTERNAL = "The server had an error while processing this request."


class BodyTooLarge(InvalidRequest):
    """The body exceeds the gateway's limit."""


class UnsupportedMediaType(InvalidRequest):
    """The body is something other than JSON."""


class BodyTooSlow(InvalidRequest):
    """The body did not arrive in time."""


class NotAdmin(Unauthenticated):
    """The key is right, but what it asks for needs an admin key."""


class RequestRejected(InvalidRequest):
    """A rule of the operator refuses the request, in the rule's own words."""

    def __init__(self, message: str, *, status: int, code: str | None, param: str | None) -> None:
        super().__init__(message, param=param)
        self.status = status
        # What clients read; `code` is the gRPC status of every mesh error.
        self.error_code = code


@dataclass(frozen=True)
class _Row:
    status: int
    type: str
    code: str | None = None
    # What the client reads instead of the error's own text.
    message: str | None = None
    retry_after_s: float | None = None


_UNAVAILABLE_ROW = _Row(503, "service_unavailable_error", message=_UNAVAILABLE, retry_after_s=1.0)

# The first class that fits counts, so subclasses stand before their bases.
_TABLE: tuple[tuple[type[Exception], _Row], ...] = (
    (BodyTooSlow, _Row(REQUEST_TIMEOUT, "invalid_request_error", "request_timeout")),
    (BodyTooLarge, _Row(413, "invalid_request_error", "request_too_large")),
    (UnsupportedMediaType, _Row(415, "invalid_request_error", "unsupported_media_type")),
    (UnsupportedParameter, _Row(400, "invalid_request_error", "unsupported_parameter")),
    (ContextLengthExceeded, _Row(400, "invalid_request_error", "context_length_exceeded")),
    (MessageTooLarge, _Row(413, "invalid_request_error", "request_too_large")),
    (InvalidRequest, _Row(400, "invalid_request_error")),
    (NotAdmin, _Row(403, "invalid_request_error", "admin_key_required")),
    (Unauthenticated, _Row(401, "invalid_request_error", "invalid_api_key")),
    (ModelNotFound, _Row(404, "invalid_request_error", "model_not_found")),
    (
        QueueFull,
        _Row(429, "rate_limit_error", "queue_full", retry_after_s=_DEFAULT_RETRY_AFTER_S),
    ),
    (RateLimited, _Row(TOO_MANY_REQUESTS, "requests", "rate_limit_exceeded")),
    (KvLeaseExpired, _UNAVAILABLE_ROW),
    (KvTransferFailed, _UNAVAILABLE_ROW),
    (
        WorkerUnavailable,
        _Row(
            503,
            "service_unavailable_error",
            "server_is_overloaded",
            _UNAVAILABLE,
            _DEFAULT_RETRY_AFTER_S,
        ),
    ),
    (DeadlineExceeded, _Row(504, "server_error", "timeout")),
)
_INTERNAL_ROW = _Row(500, "server_error", message=_INTERNAL)

# Statuses of failures, all of which have the same body.
ERROR_STATUSES = tuple(
    sorted(
        {row.status for _, row in _TABLE}
        | {_INTERNAL_ROW.status, METHOD_NOT_ALLOWED, HEADERS_TOO_LARGE}
    )
)


@dataclass(frozen=True)
class ErrorAnswer:
    """An error in OpenAI's form."""

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]


def to_answer(error: Exception) -> ErrorAnswer:
    """What the client is told about `error`."""
    if isinstance(error, HTTPException):
        return _http_answer(error)
    if isinstance(error, RequestRejected):
        return _rejection_answer(error)
    if isinstance(error, LimitExceeded):
        return _limit_answer(error)
    row = next((row for kind, row in _TABLE if isinstance(error, kind)), _INTERNAL_ROW)
    # HTTP wants to be told how to authenticate.
    headers = {"www-authenticate": "Bearer"} if row.status == UNAUTHENTICATED else {}
    retry_after_s = error.retry_after_s if isinstance(error, MeshError) else None
    if retry_after_s is None:
        retry_after_s = row.retry_after_s
    if retry_after_s is not None:
        headers["retry-after"] = retry_after(retry_after_s)
    return ErrorAnswer(
        status=row.status,
        body=envelope(
            row.message or str(error),
            type=row.type,
            param=error.param if isinstance(error, MeshError) else None,
            code=row.code,
        ),
        headers=headers,
    )


def retry_after(seconds: float) -> str:
    """Whole seconds, and never too few: who waits for so long should find what was promised."""
    return str(max(1, math.ceil(seconds)))


def envelope(
    message: str,
    *,
    type: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def _limit_answer(error: LimitExceeded) -> ErrorAnswer:
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["retry-after"] = retry_after(error.retry_after_s)
    body = envelope(str(error), type=error.type, code="rate_limit_exceeded")
    return ErrorAnswer(TOO_MANY_REQUESTS, body, headers)


def _rejection_answer(error: RequestRejected) -> ErrorAnswer:
    is_limit = error.status == TOO_MANY_REQUESTS
    body = envelope(
        str(error),
        type="rate_limit_error" if is_limit else "invalid_request_error",
        param=error.param,
        code=error.error_code,
    )
    return ErrorAnswer(error.status, body, {})


def _http_answer(error: HTTPException) -> ErrorAnswer:
    if error.status_code == NOT_FOUND:
        body = envelope("There is nothing at this URL.", code="unknown_url")
    elif error.status_code == METHOD_NOT_ALLOWED:
        body = envelope("This URL does not take this method.", code="method_not_allowed")
    else:
        body = envelope(error.detail)
    return ErrorAnswer(error.status_code, body, error.headers or {})
