"""Whether a service answers, asked from outside."""

import urllib.error
import urllib.request
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PROBE_TIMEOUT_S = 1.0


async def grpc_health(address: str, timeout_s: float = PROBE_TIMEOUT_S) -> str:
    """The name of the serving status at `address`; "UNREACHABLE" when nothing answers."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its type stubs name no methods
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return "UNREACHABLE"
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def http_health(url: str, timeout_s: float = PROBE_TIMEOUT_S) -> int | None:
    """The status code of `url`/health; None when nothing answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
