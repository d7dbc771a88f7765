"""docs/telemetry.md: what is measured, from the declarations of metrics and spans."""

from collections.abc import Iterator
from pathlib import Path

from mesh import metrics
from mesh.spans import SPANS
from mesh.vllm_names import RENAMED, WITHOUT_COUNTERPART

_INTRODUCTION = Path(__file__).with_name("telemetry_intro.md")


def text() -> str:
    """The whole page."""
    return "".join((_INTRODUCTION.read_text(), *_spans(), *_metrics(), *_vllm()))


def _spans() -> Iterator[str]:
    yield (
        "\n## Spans\n\nOne trace a request, in W3C trace context. A call that is cancelled "
        "ends its spans;\none that fails marks them.\n\n"
        "| span | service | parent | is | attributes | events |\n|---|---|---|---|---|---|\n"
    )
    for span in SPANS:
        attributes = ", ".join(f"`{one}`" for one in span.attributes)
        events = ", ".join(f"`{one}`" for one in span.events)
        parents = span.parent.split(", ") if span.parent else []
        parent = ", ".join(f"`{one}`" for one in parents) or "the client's, or none"
        yield (
            f"| `{span.name}` | {span.service} | {parent} | {span.text} | {attributes} "
            f"| {events} |\n"
        )


def _metrics() -> Iterator[str]:
    yield (
        "\n## Metrics\n\nOn `/metrics` dots are underscores, seconds and bytes are in the name, "
        "and counters end in\n`_total`. Label values are from fixed sets; whatever else comes "
        "is `other`.\n\n| metric | kind | unit | labels | service | is |\n"
        "|---|---|---|---|---|---|\n"
    )
    for one in metrics.describe():
        labels = ", ".join(f"`{label}`" for label in one.labels)
        unit = one.unit.strip("{}")
        yield f"| `{one.name}` | {one.kind} | {unit} | {labels} | {one.service} | {one.text} |\n"


def _vllm() -> Iterator[str]:
    yield (
        "\n## vLLM's names\n\nWith `vllm_metrics` a service reports these too, with the labels "
        "`model_name` and `engine`.\n\n| vLLM | here | where |\n|---|---|---|\n"
    )
    for one in RENAMED:
        where = ", ".join(f"{name}={value}" for name, value in one.where.items())
        yield f"| `{one.theirs}` | `{one.ours}` | {where} |\n"
    yield "\nThese names of vLLM's have no counterpart and are left out:\n\n"
    for name, reason in WITHOUT_COUNTERPART.items():
        yield f"- `{name}`: {reason}\n"
