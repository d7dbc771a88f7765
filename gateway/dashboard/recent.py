"""The last requests and the last minutes, in bounded memory."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from gateway.dashboard.prefixes import PromptPrefixes
from gateway.finished import FinishedRequest

# Of the series; one point a second.
SERIES_S = 120
# Of the percentiles.
WINDOW_S = 60.0

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class _Entry:
    number: int
    ended_at: float
    finished: FinishedRequest


@dataclass
class _Second:
    at: int
    num_tokens: int = 0
    num_finished: int = 0
    num_failed: int = 0
    kv_transfer_bytes: int = 0


class RecentRequests:
    """What the page shows. Adding costs a few list operations; reading does the rest."""

    def __init__(self, max_requests: int = 500, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._requests: deque[_Entry] = deque(maxlen=max_requests)
        # How many requests there were, forgotten ones included.
        self.last_number = 0
        self.prefixes = PromptPrefixes()
        self._seconds: deque[_Second] = deque(maxlen=SERIES_S)

    def add(self, finished: FinishedRequest) -> None:
        """A request is over."""
        self.last_number += 1
        self._requests.append(_Entry(self.last_number, self._clock(), finished))
        second = self._second()
        second.num_finished += 1
        second.num_failed += finished.has_failed
        second.kv_transfer_bytes += finished.kv_transfer_bytes

    def add_tokens(self, num_tokens: int) -> None:
        """Tokens have come for some request."""
        self._second().num_tokens += num_tokens

    def find(self, request_id: str) -> FinishedRequest | None:
        """The latest request of this id, the mesh's or the client's."""
        for entry in reversed(self._requests):
            if request_id in (entry.finished.request_id, entry.finished.client_request_id):
                return entry.finished
        return None

    def latest(self, limit: int, after: int = 0) -> list[FinishedRequest]:
        """The newest first, without the first `after` that there ever were."""
        if after > self.last_number:
            # Whoever counts so far has seen another process.
            after = 0
        newest = takewhile(lambda entry: entry.number > after, reversed(self._requests))
        return [entry.finished for entry in islice(newest, limit)]

    def window(self) -> list[FinishedRequest]:
        """Those of the last minute, as far as they are remembered."""
        since = self._clock() - WINDOW_S
        return [entry.finished for entry in self._requests if entry.ended_at >= since]

    def series(self) -> dict[str, list[int]]:
        """One number a second, the running second last."""
        now = int(self._clock())
        by_second = {second.at: second for second in self._seconds}
        seconds = [by_second.get(at, _Second(at)) for at in range(now - SERIES_S + 1, now + 1)]
        return {
            "tokens": [second.num_tokens for second in seconds],
            "finished": [second.num_finished for second in seconds],
            "failed": [second.num_failed for second in seconds],
            "kv_transfer_bytes": [second.kv_transfer_bytes for second in seconds],
        }

    def _second(self) -> _Second:
        now = int(self._clock())
        if not self._seconds or self._seconds[-1].at != now:
            self._seconds.append(_Second(now))
        return self._seconds[-1]


def summarize(requests: Sequence[FinishedRequest]) -> dict[str, Any]:
    """Percentiles and rates over some requests."""
    served = [one for one in requests if one.error is None]
    num_prompt_tokens = sum(one.prompt_tokens for one in served)
    num_cached_tokens = sum(one.cached_tokens or 0 for one in served)
    moved = [one for one in served if one.kv_transfer_bytes and _transfer_ms(one)]
    moved_ms = sum(map(_transfer_ms, moved))
    return {
        "num_requests": len(requests),
        "num_failed": sum(one.has_failed for one in requests),
        "ttft_ms": percentiles(one.ttft_ms for one in served),
        "tpot_ms": percentiles(one.tpot_ms for one in served),
        "total_ms": percentiles(one.total_ms for one in served),
        "batch_size": percentiles(one.mean_batch_size for one in served),
        "cache_hit_rate": num_cached_tokens / num_prompt_tokens if num_prompt_tokens else None,
        # Bytes over the time that requests waited for them.
        "kv_transfer_gb_per_s": (
            sum(one.kv_transfer_bytes for one in moved) / moved_ms / 1e6 if moved_ms else None
        ),
    }


def percentiles(values: Iterable[float | None]) -> dict[str, float] | None:
    """P50, P90 and P99 of the values that are there, by the nearest rank."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return {
        f"p{percent}": round(ordered[max(0, -(-len(ordered) * percent // 100) - 1)], 3)
        for percent in _PERCENTILES
    }


def _transfer_ms(finished: FinishedRequest) -> float:
    return finished.named_stages_ms.get("kv_transfer", 0.0)


def mean_stages_ms(requests: Sequence[FinishedRequest]) -> dict[str, float]:
    """Where the time went, over those that were served."""
    served = [one for one in requests if one.error is None]
    sums: dict[str, float] = {}
    for finished in served:
        for name, duration_ms in finished.named_stages_ms.items():
            sums[name] = sums.get(name, 0.0) + duration_ms
    return {name: round(total / len(served), 3) for name, total in sums.items()}
