"""Server-sent events as they arrive, each with the time of the read that completed it."""

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class SseEvent:
    """One event's data."""

    data: bytes
    # Events that complete in the same read arrived together: they share its time.
    at: float


class SseDecoder:
    """Cuts a byte stream into events, however it was cut into reads (WHATWG's event streams)."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        # The last read ended in CR: an LF that follows belongs to it.
        self._skips_lf = False

    def feed(self, chunk: bytes, at: float) -> list[SseEvent]:
        """Return the events that `chunk`, read at `at`, completes."""
        if self._skips_lf and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._skips_lf = False
        *lines, rest = _LINE_END.split(self._rest + chunk)
        if chunk.endswith(b"\r"):
            self._skips_lf = True
        self._rest = rest
        events: list[SseEvent] = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(SseEvent(b"\n".join(self._data), at))
                self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            # Comments keep connections alive; event names and ids mean nothing here.
        return events
