import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from mesh import errors
from mesh.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KvLeaseExpired,
    KvTransferFailed,
    MeshError,
    MessageTooLarge,
    ModelNotFound,
    QueueFull,
    Unauthenticated,
    UnsupportedParameter,
    WorkerUnavailable,
    from_rpc_error,
)


def subclasses(kind: type[MeshError]) -> list[type[MeshError]]:
    """Those that travel: a class that one service derives for itself is not on the wire."""
    below = [one for child in kind.__subclasses__() for one in (child, *subclasses(child))]
    return [one for one in below if one.__module__ == errors.__name__]


def rpc_error(
    code: grpc.StatusCode, details: str | None = "details", payload: bytes | None = None
) -> grpc.aio.AioRpcError:
    trailers: list[tuple[str, str | bytes]] = [("other", "value")]
    if payload is not None:
        trailers.append(("grpc-status-details-bin", payload))
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=details
    )


def as_rpc_error(error: MeshError) -> grpc.aio.AioRpcError:
    status = error.to_status()
    return rpc_error(error.code, status.message, status.SerializeToString())


@pytest.mark.parametrize("kind", subclasses(MeshError))
def test_every_error_is_rebuilt_from_its_status(kind: type[MeshError]) -> None:
    error = kind("what went wrong: 日本 🎉", param="messages[0].content", retry_after_s=1.25)

    rebuilt = from_rpc_error(as_rpc_error(error))

    assert type(rebuilt) is kind
    assert str(rebuilt) == "what went wrong: 日本 🎉"
    assert rebuilt.param == "messages[0].content"
    assert rebuilt.retry_after_s == 1.25


def test_absent_param_and_delay_stay_absent() -> None:
    rebuilt = from_rpc_error(as_rpc_error(QueueFull("full")))

    assert rebuilt.param is None
    assert rebuilt.retry_after_s is None


def test_an_empty_param_and_no_delay_are_not_absent() -> None:
    rebuilt = from_rpc_error(as_rpc_error(QueueFull("full", param="", retry_after_s=0)))

    assert rebuilt.param == ""
    assert rebuilt.retry_after_s == 0


def test_every_error_has_a_reason_of_its_own() -> None:
    kinds = subclasses(MeshError)

    assert len({kind.reason for kind in kinds}) == len(kinds)
    assert {kind.reason for kind in kinds} == set(errors.REASONS)


def test_the_delay_also_travels_as_retry_info() -> None:
    status = QueueFull("full", retry_after_s=2.5).to_status()

    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.reason, info.domain) == ("QUEUE_FULL", "pdmesh")
    assert retry.retry_delay.ToTimedelta().total_seconds() == 2.5


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.NOT_FOUND, ModelNotFound),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, QueueFull),
        (grpc.StatusCode.FAILED_PRECONDITION, KvLeaseExpired),
        (grpc.StatusCode.ABORTED, KvTransferFailed),
        (grpc.StatusCode.UNAVAILABLE, WorkerUnavailable),
        (grpc.StatusCode.CANCELLED, WorkerUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.INTERNAL, InternalError),
        (grpc.StatusCode.UNKNOWN, InternalError),
        (grpc.StatusCode.UNIMPLEMENTED, InternalError),
        (grpc.StatusCode.DATA_LOSS, InternalError),
    ],
)
def test_a_status_without_a_reason_goes_by_its_code(
    code: grpc.StatusCode, kind: type[MeshError]
) -> None:
    rebuilt = from_rpc_error(rpc_error(code))

    assert type(rebuilt) is kind
    assert str(rebuilt) == "details"


def foreign_status(reason: str, domain: str) -> bytes:
    status = status_pb2.Status(code=3, message="details")
    status.details.add().Pack(error_details_pb2.RetryInfo())
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain))
    payload: bytes = status.SerializeToString()
    return payload


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff not a message",
        foreign_status("QUEUE_FULL", "elsewhere.example"),
        foreign_status("FROM_A_NEWER_VERSION", "pdmesh"),
    ],
)
def test_details_that_mean_nothing_here_are_ignored(payload: bytes) -> None:
    rebuilt = from_rpc_error(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, payload=payload))

    assert type(rebuilt) is InvalidRequest


def test_the_reason_is_found_behind_other_details() -> None:
    payload = foreign_status("CONTEXT_LENGTH_EXCEEDED", "pdmesh")

    rebuilt = from_rpc_error(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, payload=payload))

    assert type(rebuilt) is ContextLengthExceeded


def test_an_unreadable_delay_is_no_delay() -> None:
    info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="pdmesh")
    info.metadata["retry_after_s"] = "soon"
    status = status_pb2.Status(code=8)
    status.details.add().Pack(info)

    rebuilt = from_rpc_error(
        rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, payload=status.SerializeToString())
    )

    assert rebuilt.retry_after_s is None


def test_an_error_without_details_names_its_code() -> None:
    assert str(from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, None))) == "UNAVAILABLE"


# GR-01
def test_a_refused_size_is_the_requests_fault_and_names_both_numbers() -> None:
    refused = rpc_error(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CLIENT: Sent message larger than max (4194305 vs. 4194304)",
    )

    rebuilt = from_rpc_error(refused)

    assert type(rebuilt) is MessageTooLarge
    assert isinstance(rebuilt, InvalidRequest)
    assert "4194305" in str(rebuilt)
    assert "4194304" in str(rebuilt)


def test_long_and_broken_text_fits_into_trailers() -> None:
    error = UnsupportedParameter("🎉" * 100_000 + "\ud800", param="x\udfff" * 10_000)

    status = error.to_status()

    assert len(status.SerializeToString()) < 2048
    assert status.message.startswith("🎉")
    assert status.message.endswith("…")
