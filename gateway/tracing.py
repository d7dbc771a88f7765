"""One span for each attempt to serve a choice, so that a failover shows both."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from opentelemetry.trace import StatusCode

from gateway.generation import Job
from mesh.errors import MeshError
from mesh.telemetry import start_span


@asynccontextmanager
async def attempt_span(job: Job) -> AsyncIterator[None]:
    """The parent of what other services do in this attempt.

    Calls are made under it by `use_span`; it is not current, for the block yields.
    """
    span = job.trace.attempt_span = start_span(
        "gateway.attempt", {"pdmesh.attempt": job.trace.num_attempts}
    )
    try:
        yield
    except MeshError as error:
        span.set_attribute("error.type", error.reason)
        span.set_status(StatusCode.ERROR)
        raise
    finally:
        if span.is_recording():
            span.set_attribute("pdmesh.prefill_worker_id", job.trace.prefill_worker_id)
            span.set_attribute("pdmesh.decode_worker_id", job.trace.decode_worker_id)
            span.set_attribute("pdmesh.num_output_tokens", len(job.output_token_ids))
        span.end()
