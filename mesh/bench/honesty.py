"""What a report refuses to say: the three fake numbers, and numbers without their facts."""

from collections.abc import Iterable
from dataclasses import fields
from enum import StrEnum

from mesh.bench.results import BenchResult, Facts

# What the field calls long: half of it and more is what the load must be made of.
LONG_DOCUMENT_TOKENS = 4000
# Below this many values the 99th percentile is hardly more than the largest.
MIN_VALUES_FOR_P99 = 100


class Claim(StrEnum):
    """What a report is to be quoted for, beyond what it measured."""

    CAPACITY = "capacity"
    LONG_DOCUMENTS = "long-documents"


def refusals(result: BenchResult, claims: Iterable[Claim] = ()) -> list[str]:
    """Why no report can be made of this; empty if one can."""
    found = [
        f"the fact {field.name.replace('_', ' ')!r} is missing: "
        "without it the numbers compare with no others"
        for field in fields(Facts)
        if not getattr(result.facts, field.name).strip()
    ]
    if not any(point.rounds for point in result.points):
        found.append("nothing was measured")
    for claim in claims:
        match claim:
            case Claim.CAPACITY:
                found += _capacity(result)
            case Claim.LONG_DOCUMENTS:
                found += _long_documents(result)
    return found


def remarks(result: BenchResult) -> list[str]:
    """What a reader must know before quoting the numbers."""
    found: list[str] = []
    for point in result.points:
        for group, summary in point.pooled.items():
            place = f"{point.label}, {group}"
            count = summary.ttft_ms.count if summary.ttft_ms else 0
            if count < MIN_VALUES_FOR_P99:
                found.append(f"{place}: P99 of {count} requests is about their maximum")
            if summary.num_errors:
                found.append(f"{place}: {summary.num_errors} of {summary.num_requests} failed")
            if summary.num_cut:
                found.append(f"{place}: {summary.num_cut} were not finished at the end")
            if summary.events_per_token is not None and summary.events_per_token < 0.98:
                found.append(
                    f"{place}: {summary.events_per_token:.2f} events a token; "
                    "inter-token gaps are those between events"
                )
        if any(each.client_cpu > 0.7 for each in point.rounds):
            found.append(f"{point.label}: the client was busy; it may be what was measured")
        if any(each.max_late_ms > 50 for each in point.rounds):
            found.append(f"{point.label}: the client sent late; arrivals were not as planned")
    if result.knee is None:
        reason = result.no_knee or "no sweep was run"
        found.append(f"throughput at a concurrency is not capacity ({reason})")
    return found


def _capacity(result: BenchResult) -> list[str]:
    if result.knee is not None:
        return []
    reason = result.no_knee or "run a sweep"
    return [f"saturated throughput is not capacity: that is 75% of a sweep's knee ({reason})"]


def _long_documents(result: BenchResult) -> list[str]:
    for point in result.points:
        inputs = [summary.prompt_tokens for summary in point.pooled.values()]
        if any(each and each.p50 >= LONG_DOCUMENT_TOKENS for each in inputs):
            return []
    return [
        f"short prompts say nothing about long documents: no group has a median input of "
        f"{LONG_DOCUMENT_TOKENS:,} tokens or more"
    ]
