"""Finds where more concurrency stops paying, and quotes less than that as capacity."""

from collections.abc import Sequence
from math import log2

from mesh.bench.results import Knee, Point

CAPACITY_SHARE = 0.75

MIN_POINTS = 4
# Least bend: height of the curve above the straight line from its first point to its last.
_MIN_BEND = 0.1
# A doubling of concurrency that brings more than this has not reached saturation.
_SATURATED_GAIN = 0.1


class NoKnee(Exception):
    """The sweep shows none; the message says why."""


def find_knee(points: Sequence[Point], group: str) -> Knee:
    """Return the point of the throughput curve that lies highest above its chord (Kneedle).

    Raises:
        NoKnee: too few points, throughput that still rises at the end, or no bend.
    """
    curve = sorted(
        (point.concurrency, point.pooled[group].output_tokens_per_s)
        for point in points
        if point.concurrency is not None and group in point.pooled
    )
    if len({concurrency for concurrency, _ in curve}) < MIN_POINTS:
        raise NoKnee(f"a knee needs {MIN_POINTS} concurrencies or more")
    (before, tokens_before), (last, tokens_last) = curve[-2:]
    gain = tokens_last / tokens_before - 1 if tokens_before else 1.0
    gain_per_doubling = gain / log2(last / before)
    if gain_per_doubling > _SATURATED_GAIN:
        raise NoKnee(
            f"throughput still rises by {gain_per_doubling:.0%} a doubling at {last} at once: "
            "sweep further"
        )
    least, most = curve[0][0], last
    lowest = min(tokens for _, tokens in curve)
    highest = max(tokens for _, tokens in curve)
    if not highest > lowest:
        raise NoKnee("throughput is the same at every concurrency")
    bend, concurrency, tokens_per_s = max(
        (
            (tokens - lowest) / (highest - lowest) - (each - least) / (most - least),
            # Of equals the smaller one.
            -each,
            tokens,
        )
        for each, tokens in curve
    )
    if bend < _MIN_BEND:
        raise NoKnee("throughput grows evenly with concurrency: no bend")
    return Knee(
        concurrency=-concurrency,
        output_tokens_per_s=tokens_per_s,
        capacity_tokens_per_s=round(CAPACITY_SHARE * tokens_per_s, 3),
        highest_output_tokens_per_s=highest,
    )
