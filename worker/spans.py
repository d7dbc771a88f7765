"""Spans of streaming handlers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.trace import Status, StatusCode

from mesh.telemetry import Span, start_span


@contextmanager
def run_span(name: str, attributes: Mapping[str, str | int]) -> Iterator[Span]:
    """A span that ends with the block and that nothing inside sees as the current one.

    A handler yields inside it, and whatever is current across a `yield` leaks.
    """
    span = start_span(name, attributes)
    try:
        yield span
    except Exception as error:
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        raise
    finally:
        span.end()
