"""Where a request's time went: every moment of its critical path belongs to one stage."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from mesh.v1 import types_pb2

Stage: TypeAlias = "types_pb2.Stage.ValueType"
Timings: TypeAlias = Sequence[types_pb2.StageTiming]

# A read that takes no longer found its message there already.
_AT_ONCE_MS = 1.0
# A request that starts over a hundred times is still accounted for, but not drawn.
_MAX_SEGMENTS = 64


@dataclass(frozen=True)
class Segment:
    """A piece of the critical path, in milliseconds since the request's first byte."""

    stage: Stage
    start_ms: float
    duration_ms: float


@dataclass
class _Stream:
    """A worker at work for the request, while the gateway deals with what came already."""

    started_ms: float
    first_at_ms: float | None = None
    last_at_ms: float | None = None
    # The stages until the first tokens, as the worker tells with them.
    until_first: Timings = ()
    # What the gateway did since the last message.
    pending: dict[Stage, float] = field(default_factory=dict)
    # What it did while the next message was there and waited.
    exposed: dict[Stage, float] = field(default_factory=dict)


class Timeline:
    """The request is in one stage at a time: `enter` ends one and begins the next.

    What other processes measured comes as durations by their own clocks: `reported` puts
    them into the time that the call took here, and what is left of that is network. While
    a worker streams, the gateway's own work happens beside the worker's and counts only
    where the worker's next message had to wait for it.
    """

    def __init__(
        self,
        stage: Stage = types_pb2.STAGE_NETWORK,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._started_at = clock()
        self._mark_ms = 0.0
        self._stage = stage
        self._stream: _Stream | None = None
        self.stages_ms: dict[Stage, float] = {}
        self.segments: list[Segment] = []
        # What workers measured beyond the time that was theirs alone.
        self.overlap_ms = 0.0

    def fork(self, stage: Stage) -> "Timeline":
        """The timeline of one of the request's choices, from here on."""
        forked = Timeline(stage, self._clock)
        forked._started_at = self._started_at
        forked._mark_ms = self._mark_ms
        return forked

    def join(self, choice: "Timeline") -> None:
        """Go on where a choice has ended; what happened here meanwhile was beside it."""
        for stage, duration_ms in choice.stages_ms.items():
            self.stages_ms[stage] = self.stages_ms.get(stage, 0.0) + duration_ms
        self.segments += choice.segments
        self.overlap_ms += choice.overlap_ms
        self._mark_ms = choice._mark_ms
        self._stage = types_pb2.STAGE_WRITE

    @property
    def elapsed_ms(self) -> float:
        """Since the request's first byte."""
        return (self._clock() - self._started_at) * 1000

    @property
    def mark_ms(self) -> float:
        """Until when the time is accounted for."""
        return self._mark_ms

    def enter(self, stage: Stage) -> None:
        """The stage so far has ended."""
        duration_ms = self._take()
        if self._stream is None:
            self._add(self._stage, duration_ms)
        elif self._stage != types_pb2.STAGE_NETWORK:
            pending = self._stream.pending
            pending[self._stage] = pending.get(self._stage, 0.0) + duration_ms
        self._stage = stage

    def reported(self, timings: Timings) -> None:
        """A call has ended and says how it spent its time; the rest of that is network.

        One that says nothing spent all of it in the current stage.
        """
        if timings:
            duration_ms = self._take()
            self._stage = types_pb2.STAGE_NETWORK
            self._distribute(duration_ms, [(one.stage, one.duration_ms) for one in timings])
        self.enter(types_pb2.STAGE_NETWORK)

    def begin_stream(self) -> None:
        """From now on a worker works, whatever happens here."""
        self.enter(types_pb2.STAGE_NETWORK)
        self._stream = _Stream(self._mark_ms)

    def received(self, until_first: Timings = ()) -> None:
        """A message of the stream has come."""
        stream = self._stream
        if stream is None:
            return
        waited_ms = self._take()
        if waited_ms <= _AT_ONCE_MS:
            for stage, duration_ms in stream.pending.items():
                stream.exposed[stage] = stream.exposed.get(stage, 0.0) + duration_ms
        stream.pending.clear()
        stream.last_at_ms = self._mark_ms
        if stream.first_at_ms is None:
            stream.first_at_ms = self._mark_ms
            stream.until_first = until_first

    def end_stream(self, timings: Timings | None = None) -> None:
        """The worker is done, with its account, or the stream was cut; later calls do nothing."""
        if self._stream is None:
            return
        self.enter(types_pb2.STAGE_NETWORK)
        stream, self._stream = self._stream, None
        parts = (
            self._cut_parts(stream)
            if timings is None
            else [(one.stage, one.duration_ms) for one in timings]
        )
        exposed = _sum(stream.exposed, stream.pending)
        self._distribute(self._mark_ms - stream.started_ms, parts, exposed, stream.started_ms)

    def so_far(self) -> dict[Stage, float]:
        """Milliseconds by stage until now."""
        stages = dict(self.stages_ms)
        stream = self._stream
        if stream is None or stream.first_at_ms is None:
            return stages
        known = [(one.stage, one.duration_ms) for one in stream.until_first]
        rest_ms = stream.first_at_ms - stream.started_ms - sum(ms for _, ms in known)
        parts = {types_pb2.STAGE_NETWORK: max(0.0, rest_ms)}
        return _sum(stages, dict(known), parts, stream.pending)

    def _cut_parts(self, stream: _Stream) -> list[tuple[Stage, float]]:
        """Without the worker's account: what it said first, then steps, then silence."""
        if stream.first_at_ms is None or stream.last_at_ms is None:
            return [(types_pb2.STAGE_DECODE_WAIT, self._mark_ms - stream.started_ms)]
        until_first = [(one.stage, one.duration_ms) for one in stream.until_first]
        silence_ms = self._mark_ms - stream.last_at_ms - sum(stream.pending.values())
        steps = (types_pb2.STAGE_DECODE_STEPS, stream.last_at_ms - stream.first_at_ms)
        silence = (types_pb2.STAGE_DECODE_WAIT, silence_ms)
        return [*until_first, *(part for part in (steps, silence) if part[1] > 0)]

    def _distribute(
        self,
        total_ms: float,
        parts: Iterable[tuple[Stage, float]],
        exposed: dict[Stage, float] | None = None,
        start_ms: float | None = None,
    ) -> None:
        """Fill `total_ms` with the parts; less time than they need was shared with others."""
        start_ms = self._mark_ms - total_ms if start_ms is None else start_ms
        kept, excess_ms = _trimmed(list(parts), total_ms)
        self.overlap_ms += excess_ms
        left_ms = total_ms - sum(duration_ms for _, duration_ms in kept)
        beside = list(exposed.items()) if exposed else []
        beside, _ = _trimmed(beside, left_ms)
        network_ms = max(0.0, left_ms - sum(duration_ms for _, duration_ms in beside))
        # Which way a message took longer nobody knows: half of it is drawn on either side.
        half = (types_pb2.STAGE_NETWORK, network_ms / 2)
        for stage, _ in kept:
            # What happened beside another stage happened: it shows, with no time of its own.
            self.stages_ms.setdefault(stage, 0.0)
        for stage, duration_ms in (half, *kept, *beside, half):
            self._add(stage, duration_ms, start_ms)
            start_ms += duration_ms

    def _add(self, stage: Stage, duration_ms: float, start_ms: float | None = None) -> None:
        if duration_ms <= 0:
            return
        self.stages_ms[stage] = self.stages_ms.get(stage, 0.0) + duration_ms
        start_ms = self._mark_ms - duration_ms if start_ms is None else start_ms
        last = self.segments[-1] if self.segments else None
        if last is not None and last.stage == stage:
            self.segments[-1] = Segment(stage, last.start_ms, last.duration_ms + duration_ms)
        elif len(self.segments) < _MAX_SEGMENTS:
            self.segments.append(Segment(stage, start_ms, duration_ms))

    def _take(self) -> float:
        """Milliseconds since the last time; everything up to now is accounted for."""
        now_ms = self.elapsed_ms
        duration_ms, self._mark_ms = now_ms - self._mark_ms, now_ms
        return duration_ms


def _trimmed(
    parts: list[tuple[Stage, float]], total_ms: float
) -> tuple[list[tuple[Stage, float]], float]:
    """The end of `parts` that fits into `total_ms`, and how much did not.

    What came first happened while something else was still being charged.
    """
    excess_ms = trim_ms = max(0.0, sum(duration_ms for _, duration_ms in parts) - total_ms)
    kept: list[tuple[Stage, float]] = []
    for stage, duration_ms in parts:
        cut_ms = min(trim_ms, duration_ms)
        trim_ms -= cut_ms
        kept.append((stage, duration_ms - cut_ms))
    return kept, excess_ms


def _sum(*parts: dict[Stage, float]) -> dict[Stage, float]:
    total: dict[Stage, float] = {}
    for part in parts:
        for stage, duration_ms in part.items():
            total[stage] = total.get(stage, 0.0) + duration_ms
    return total
