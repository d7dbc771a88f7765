"""The knee, what may be called capacity, and what a report refuses to say."""

from dataclasses import replace

import pytest

from mesh.bench.honesty import Claim, refusals, remarks
from mesh.bench.knee import NoKnee, find_knee
from mesh.bench.report import ReportRefused, render
from mesh.bench.results import BenchResult, Facts, Point
from tests.bench.made import FACTS, point, recording, result, window


def at(concurrency: int, tokens_per_s: int, *, num_prompt_tokens: int = 64) -> Point:
    """A point whose requests bring so many tokens within a second."""
    made = recording(
        ttft_s=0.0,
        tpot_s=0.5 / tokens_per_s,
        num_tokens=tokens_per_s,
        num_prompt_tokens=num_prompt_tokens,
    )
    return point(f"{concurrency} at once", concurrency, [window([made])])


def sweep(*pairs: tuple[int, int]) -> list[Point]:
    return [at(concurrency, tokens_per_s) for concurrency, tokens_per_s in pairs]


def test_the_knee_is_where_the_curve_bends_and_capacity_is_three_quarters_of_it() -> None:
    points = sweep((1, 100), (2, 190), (4, 350), (8, 600), (16, 650), (32, 660))

    knee = find_knee(points, "requests")

    assert knee.concurrency == 8
    assert knee.output_tokens_per_s == pytest.approx(600)
    assert knee.capacity_tokens_per_s == pytest.approx(450)
    assert knee.highest_output_tokens_per_s == pytest.approx(660)


def test_throughput_that_falls_after_saturation_does_not_move_the_knee() -> None:
    points = sweep((1, 100), (2, 190), (4, 350), (8, 600), (16, 580), (32, 500))

    assert find_knee(points, "requests").concurrency == 8


def test_the_order_of_a_sweep_does_not_matter() -> None:
    points = sweep((32, 660), (8, 600), (1, 100), (2, 190), (16, 650), (4, 350))

    assert find_knee(points, "requests").concurrency == 8


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        (((1, 100), (2, 200), (4, 201)), "4 concurrencies"),
        (((1, 100), (2, 190), (4, 350), (8, 600)), "sweep further"),
        (((1, 100), (2, 100), (4, 100), (8, 100)), "the same"),
        (((1, 400), (2, 300), (4, 200), (8, 100)), None),
    ],
)
def test_there_is_no_knee_where_none_can_be_seen(
    pairs: tuple[tuple[int, int], ...], reason: str | None
) -> None:
    points = sweep(*pairs)
    if reason is None:
        # One at a time is as good as it gets.
        assert find_knee(points, "requests").concurrency == 1
        return

    with pytest.raises(NoKnee, match=reason):
        find_knee(points, "requests")


def measured(**changes: object) -> BenchResult:
    return replace(result(sweep((1, 100))), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("fact", list(vars(FACTS)))
def test_no_report_without_each_of_the_eight_facts(fact: str) -> None:
    facts: Facts = replace(FACTS, **{fact: "  "})

    with pytest.raises(ReportRefused, match=fact.replace("_", " ")):
        render(measured(facts=facts))


def test_there_are_eight_facts() -> None:
    assert len(vars(FACTS)) == 8


def test_no_report_of_nothing() -> None:
    assert refusals(measured(points=())) == ["nothing was measured"]


def test_saturated_throughput_is_refused_as_capacity() -> None:
    with pytest.raises(ReportRefused, match="saturated throughput is not capacity"):
        render(measured(), [Claim.CAPACITY])


def test_a_sweep_with_a_knee_carries_a_claim_of_capacity() -> None:
    points = sweep((1, 100), (2, 190), (4, 350), (8, 600), (16, 650), (32, 660))
    made = result(points, knee=find_knee(points, "requests"))

    html = render(made, [Claim.CAPACITY])

    assert "<strong>450.0 tokens/s</strong>" in html
    assert "which is not capacity" in html


def test_without_a_sweep_the_report_says_that_throughput_is_not_capacity() -> None:
    html = render(measured())

    assert "Capacity</h2>" not in html
    assert "throughput at a concurrency is not capacity (no sweep was run)" in html


def test_short_prompts_are_refused_for_long_documents() -> None:
    with pytest.raises(ReportRefused, match="4,000 tokens or more"):
        render(measured(), [Claim.LONG_DOCUMENTS])


def test_long_prompts_carry_a_claim_about_long_documents() -> None:
    made = result([at(1, 100, num_prompt_tokens=4000)])

    assert refusals(made, [Claim.LONG_DOCUMENTS]) == []


def test_every_latency_of_a_report_comes_with_its_percentiles() -> None:
    html = render(measured())

    for name in ("TTFT", "TPOT", "ITL", "end to end"):
        for statistic in ("P50", "P90", "P99"):
            assert f"<th>{name} {statistic}</th>" in html
    assert "mean" not in html.lower()


def test_a_p99_of_few_requests_is_remarked() -> None:
    assert any("about their maximum" in remark for remark in remarks(measured()))


def test_a_busy_or_late_client_is_remarked() -> None:
    busy = window([recording()])
    busy.client_cpu_s = 0.9
    late = window([recording()])
    late.recordings[0].late_s = 0.2

    found = remarks(result([point("a", 1, [busy]), point("b", 2, [late])]))

    assert any("the client was busy" in remark for remark in found)
    assert any("the client sent late" in remark for remark in found)


def test_failures_are_remarked() -> None:
    broken = recording()
    broken.error = "HTTP 500"

    found = remarks(result([point("a", 1, [window([broken, recording()])])]))

    assert any("1 of 2 failed" in remark for remark in found)


def test_a_report_stands_alone_and_escapes_what_it_is_given() -> None:
    facts = replace(FACTS, hardware="<script>alert(1)</script>")
    points = sweep((1, 100), (2, 190))

    html = render(result(points, facts=facts))

    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert html.count("<svg") == 7
    for outside in ("http://", "https://", "src=", "<link", "@import", "url("):
        assert outside not in html
