"""Calls of DecodeService, and what comes of them."""

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from decode_svc.kv_import import KvImportLimits
from mesh.errors import MeshError, from_rpc_error
from mesh.v1 import decode_pb2
from tests.worker_wire import DecodeRig, decode_request

if TYPE_CHECKING:
    from mesh.v1.decode_pb2_grpc import DecodeServiceAsyncStub

    Stub = DecodeServiceAsyncStub
else:
    Stub = Any


PROMPT = [5, 6, 7, 8, 9, 10]

gives_up_soon = pytest.mark.parametrize(
    "limits", [KvImportLimits(pull_timeout_s=0.3, release_timeout_s=0.3)], ids=["soon"]
)


def remote_request(
    rig: DecodeRig, num_tokens: int = 6, layout_fingerprint: str = "f1"
) -> decode_pb2.DecodeRequest:
    """Six prompt tokens in blocks of four, and the first token."""
    handle = rig.handle(num_tokens, 11, 12, layout_fingerprint=layout_fingerprint)
    return decode_request(prompt=PROMPT, output=[3], kv_handle=handle)


async def failure_of(stub: Stub, request: decode_pb2.DecodeRequest) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Decode(request, timeout=20):
            pass
    return from_rpc_error(caught.value)


def tokens_of(events: list[decode_pb2.DecodeResponse]) -> list[int]:
    return [token_id for event in events for token_id in event.tokens.token_ids]
