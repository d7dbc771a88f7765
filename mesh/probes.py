"""Whether a service answers, asked from outside."""

import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PROBE_TIMEOUT_S = 1.0
# A health check knows this name only while the service drains: that it does not serve then is
# nothing to mend, as it would be at other times.
DRAINING = "pdmesh.draining"


async def grpc_health(address: str, timeout_s: float = PROBE_TIMEOUT_S) -> str:
    """The name of the serving status at `address`; "UNREACHABLE" when nothing answers."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            return await _check(channel, "", timeout_s)
        except grpc.aio.AioRpcError:
            return "UNREACHABLE"


async def grpc_alive(address: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Whether a service answers and serves or, if it does not serve, is on its way out."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            if await _check(channel, "", timeout_s) == "SERVING":
                return True
            await _check(channel, DRAINING, timeout_s)
        except grpc.aio.AioRpcError:
            # Nobody answers, or there is no such thing as this service's drain.
            return False
        return True


async def _check(channel: grpc.aio.Channel, service_name: str, timeout_s: float) -> str:
    stub: Any = health_pb2_grpc.HealthStub(channel)  # its type stubs name no methods
    request = health_pb2.HealthCheckRequest(service=service_name)
    response = await stub.Check(request, timeout=timeout_s)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def http_health(url: str, timeout_s: float = PROBE_TIMEOUT_S) -> int | None:
    """The status code of `url`/health; None when nothing answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, HTTPException):
        # Nobody, or another program that does not speak HTTP.
        return None
