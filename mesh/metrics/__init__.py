"""Every metric of the mesh, declared once by area, and their text form for /metrics."""

from collections.abc import Callable

from prometheus_client import start_http_server
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from mesh.instruments import DESCRIPTIONS, REGISTRY, Description
from mesh.metrics.engine import *  # noqa: F403 (the areas are for authors, not for users)
from mesh.metrics.gateway import *  # noqa: F403
from mesh.metrics.kv_transfer import *  # noqa: F403
from mesh.metrics.labels import MODELS as MODELS
from mesh.metrics.labels import OPERATIONS as OPERATIONS
from mesh.metrics.labels import OUTCOMES as OUTCOMES
from mesh.metrics.labels import REASONS as REASONS
from mesh.metrics.labels import STAGES as STAGES
from mesh.metrics.redis import *  # noqa: F403
from mesh.metrics.scheduler import *  # noqa: F403
from mesh.metrics.tokenizer import *  # noqa: F403
from mesh.vllm_names import VllmNames

_names = VllmNames(MODELS)


def describe() -> list[Description]:
    """Every instrument, in the order of declaration."""
    return list(DESCRIPTIONS)


def render() -> tuple[bytes, str]:
    """The body and the content type of /metrics."""
    return generate_latest(REGISTRY), CONTENT_TYPE_LATEST


def listen(address: str | None, *, vllm_names: bool = False) -> Callable[[], None]:
    """Answer GET /metrics at "host:port" from a thread of its own; call the result to stop.

    The thread answers although the event loop is stuck, which is when somebody asks.
    Without an address nothing listens; with `vllm_names`, /metrics has vLLM's names too.
    """
    if vllm_names:
        _names.register(REGISTRY)
    if address is None:
        return lambda: None
    host, _, port = address.rpartition(":")
    server, thread = start_http_server(int(port), host.strip("[]"), registry=REGISTRY)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def forget_vllm_names() -> None:
    """Undo `vllm_names`."""
    _names.unregister()
