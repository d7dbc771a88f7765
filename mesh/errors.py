"""The error taxonomy of the mesh and its form on the wire."""

import re
from collections.abc import Iterator
from typing import ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "pdmesh"

_DETAILS_KEY = "grpc-status-details-bin"
# A status travels in the trailers, twice (as text and in the details), and a peer
# may refuse trailers above 8 KiB: the text is cut rather than the whole answer lost.
_MAX_TEXT_BYTES = 1024
_MAX_PARAM_BYTES = 256
_TOO_LARGE = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")


class MeshError(Exception):
    """A failure with a meaning; each subclass is one row of the taxonomy."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s

    def to_status(self) -> status_pb2.Status:
        """The rich status: ErrorInfo always, RetryInfo when a delay is known."""
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN)
        if self.param is not None:
            info.metadata["param"] = _cut(self.param, _MAX_PARAM_BYTES)
        if self.retry_after_s is not None:
            info.metadata["retry_after_s"] = repr(float(self.retry_after_s))
        status = status_pb2.Status(
            code=self.code.value[0], message=_cut(str(self), _MAX_TEXT_BYTES)
        )
        status.details.add().Pack(info)
        if self.retry_after_s is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromNanoseconds(int(self.retry_after_s * 1e9))
            status.details.add().Pack(retry)
        return status


class InvalidRequest(MeshError):
    """The caller's mistake: the same request fails everywhere."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"


class UnsupportedParameter(InvalidRequest):
    """A known parameter that this mesh does not implement; `param` names it."""

    reason = "UNSUPPORTED_PARAMETER"


class MessageTooLarge(InvalidRequest):
    """A message between services would exceed the limit that both ends set."""

    reason = "MESSAGE_TOO_LARGE"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output do not fit the model's window."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class Unauthenticated(MeshError):
    """No key, or one that is not known."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class ModelNotFound(MeshError):
    """No worker serves the model."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


class QueueFull(MeshError):
    """Refused early; `retry_after_s` says when to come back."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class RateLimited(MeshError):
    """The caller has used up what its key allows; `retry_after_s` says when there is more."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "RATE_LIMITED"


class KvLeaseExpired(MeshError):
    """The blocks were reclaimed; the prompt must be computed again."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "KV_LEASE_EXPIRED"


class KvTransferFailed(MeshError):
    """The blocks did not arrive; the prompt must be computed again."""

    code = grpc.StatusCode.ABORTED
    reason = "KV_TRANSFER_FAILED"


class LayoutMismatch(MeshError):
    """Two engines lay out their KV blocks differently and can never exchange them."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "LAYOUT_MISMATCH"


class WorkerUnavailable(MeshError):
    """Draining, lost or unreachable: another worker may serve the request."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "WORKER_UNAVAILABLE"


class Draining(WorkerUnavailable):
    """Stopping in good order: another worker or scheduler serves the request, and nobody failed."""

    reason = "DRAINING"


class DeadlineExceeded(MeshError):
    """The caller's time is up."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class InternalError(MeshError):
    """A bug, on this side of the wire or the other; its text is for logs only."""


_BY_REASON: dict[str, type[MeshError]] = {
    error.reason: error
    for error in (
        InvalidRequest,
        UnsupportedParameter,
        MessageTooLarge,
        ContextLengthExceeded,
        Unauthenticated,
        ModelNotFound,
        QueueFull,
        RateLimited,
        KvLeaseExpired,
        KvTransferFailed,
        LayoutMismatch,
        WorkerUnavailable,
        Draining,
        DeadlineExceeded,
        InternalError,
    )
}

REASONS = tuple(_BY_REASON)

# For statuses that gRPC itself or a foreign server made: they carry no reason.
_BY_CODE: dict[grpc.StatusCode, type[MeshError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Unauthenticated,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    grpc.StatusCode.FAILED_PRECONDITION: KvLeaseExpired,
    grpc.StatusCode.ABORTED: KvTransferFailed,
    grpc.StatusCode.UNAVAILABLE: WorkerUnavailable,
    # Our own cancel never arrives as an RPC error: here the server gave up.
    grpc.StatusCode.CANCELLED: WorkerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def from_rpc_error(error: grpc.aio.AioRpcError) -> MeshError:
    """Rebuild the exception that the server raised."""
    message = error.details() or error.code().name
    info = _error_info(error)
    if info is not None and info.reason in _BY_REASON:
        return _BY_REASON[info.reason](
            message,
            param=info.metadata.get("param"),
            retry_after_s=_to_float(info.metadata.get("retry_after_s")),
        )
    too_large = _TOO_LARGE.search(message)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and too_large is not None:
        size, limit = too_large.groups()
        return MessageTooLarge(f"a message of {size} bytes exceeds the limit of {limit} bytes")
    return _BY_CODE.get(error.code(), InternalError)(message)


def _error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    for payload in _details_payloads(error):
        try:
            status = status_pb2.Status.FromString(payload)
            for detail in status.details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info) and info.domain == DOMAIN:
                    return info
        except DecodeError:
            # Foreign trailers under the same key; the plain status still counts.
            continue
    return None


def _details_payloads(error: grpc.aio.AioRpcError) -> Iterator[bytes]:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            yield value


def _to_float(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _cut(text: str, max_bytes: int) -> str:
    """At most `max_bytes` of valid UTF-8 (unpaired surrogates become `?`)."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - 3].decode("utf-8", "ignore") + "…"
