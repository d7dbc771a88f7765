"""Framing of server-sent events."""

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    # Proxies must neither keep, hold back nor compress what is being written.
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)

# JSON escapes the line breaks that the format knows. These three, which it does not,
# split lines in clients that use a general `splitlines`. Their bytes occur nowhere
# else in UTF-8.
_LINE_BREAKS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def event(payload: Any) -> bytes:
    """One event with a JSON payload."""
    data = orjson.dumps(payload)
    for raw, escaped in _LINE_BREAKS:
        data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"
