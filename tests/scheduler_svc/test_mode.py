"""One worker or two: by measured costs, with a verdict on the deployment."""

from dataclasses import replace
from random import Random

import pytest

from scheduler_svc.estimates import Estimates
from scheduler_svc.mode import Advice, Comparison, Comparisons, PlacementMode, Reason, compare
from scheduler_svc.placement import Decision, PlacementSettings, place
from scheduler_svc.workers import (
    ActiveLoad,
    Candidate,
    PrefixHit,
    RequestFacts,
    Role,
    WorkerView,
)

DECODE = WorkerView("d0", "1", "d0@1", Role.DECODE, "d0:1", "smol", "f1", 16, 1000, 8192)
PREFILL = replace(DECODE, worker_id="p0", holder_id="p0@1", role=Role.PREFILL)
FACTS = RequestFacts("smol", 1600, 16)
SETTINGS = PlacementSettings(explore_ratio=0, local_margin=0)


def measured(
    *, prefill_tokens_per_s: float = 5000, local_tokens_per_s: float = 5000, pull_s: float = 0.1
) -> Estimates:
    estimates = Estimates()
    for number in range(40):
        num_tokens = 100 + 50 * number
        estimates.prefill[Role.PREFILL].observe(num_tokens, 0, num_tokens / prefill_tokens_per_s)
        estimates.prefill[Role.DECODE].observe(num_tokens, 0, num_tokens / local_tokens_per_s)
        estimates.observe_transfer(num_tokens, pull_s)
    return estimates


def decide(
    estimates: Estimates,
    decode: WorkerView = DECODE,
    prefill: WorkerView = PREFILL,
    settings: PlacementSettings = SETTINGS,
    hits: dict[str, PrefixHit] | None = None,
    seed: int = 0,
) -> Decision:
    decision = place(FACTS, [prefill, decode], hits or {}, settings, Random(seed), estimates)
    assert decision is not None
    return decision


def test_comparison_adds_queues_compute_and_transfer() -> None:
    busy_prefill = replace(PREFILL, charged=ActiveLoad(1, 1000, 70))
    busy_decode = replace(DECODE, charged=ActiveLoad(10, 500, 70))

    comparison = compare(
        FACTS,
        Candidate(busy_decode, PrefixHit(50)),
        Candidate(busy_prefill, PrefixHit(75)),
        measured(),
        interference=0.1,
    )

    assert comparison is not None
    # 500 waiting tokens, then 800 missing ones that hold up ten others.
    assert comparison.local_s == pytest.approx(0.1 + 0.16 * 2, rel=0.02)
    # 1000 waiting tokens, then 400 missing ones, then the pull.
    assert comparison.remote_s == pytest.approx(0.2 + 0.08 + 0.1, rel=0.02)


def test_nothing_is_compared_before_everything_is_measured() -> None:
    estimates = Estimates()
    assert decide(estimates).reason is Reason.PREFILL_REMOTE
    for _ in range(20):
        estimates.prefill[Role.PREFILL].observe(1000, 0, 0.2)
    assert decide(estimates).reason is Reason.PREFILL_REMOTE


def test_idle_decode_worker_as_fast_as_prefill_computes_the_prompt_itself() -> None:
    decision = decide(measured())

    assert (decision.mode, decision.reason) == (PlacementMode.LOCAL, Reason.LOCAL_CHEAPER)
    assert decision.prefill is None
    assert decision.comparison is not None
    assert decision.comparison.local_s < decision.comparison.remote_s


@pytest.mark.parametrize(
    ("estimates", "decode", "prefill", "hits", "mode"),
    [
        # A decode worker that serves many, or that computes slowly.
        (measured(), replace(DECODE, charged=ActiveLoad(20, 0, 100)), PREFILL, {}, "disaggregated"),
        (measured(local_tokens_per_s=1000), DECODE, PREFILL, {}, "disaggregated"),
        # A long queue before the prefill worker, a slow wire, or the prefix at home.
        (
            measured(local_tokens_per_s=2000),
            DECODE,
            replace(PREFILL, charged=ActiveLoad(3, 9000, 300)),
            {},
            "local",
        ),
        (measured(local_tokens_per_s=2500, pull_s=0.5), DECODE, PREFILL, {}, "local"),
        (measured(local_tokens_per_s=1000), DECODE, PREFILL, {"d0@1": PrefixHit(95)}, "local"),
        # The prefix on the prefill worker.
        (measured(), DECODE, PREFILL, {"p0@1": PrefixHit(95)}, "disaggregated"),
    ],
)
def test_the_cheaper_mode_is_chosen(
    estimates: Estimates,
    decode: WorkerView,
    prefill: WorkerView,
    hits: dict[str, PrefixHit],
    mode: str,
) -> None:
    decision = decide(estimates, decode, prefill, hits=hits)

    assert decision.mode == mode
    assert decision.reason in (Reason.LOCAL_CHEAPER, Reason.REMOTE_CHEAPER)


def test_local_mode_must_be_cheaper_by_the_margin() -> None:
    by_half = PlacementSettings(explore_ratio=0)

    decision = decide(measured(), settings=by_half)

    assert (decision.mode, decision.reason) == (
        PlacementMode.DISAGGREGATED,
        Reason.REMOTE_CHEAPER,
    )


def test_the_other_mode_is_tried_once_in_a_while() -> None:
    settings = PlacementSettings(explore_ratio=0.1, local_margin=0)

    decisions = [decide(measured(), settings=settings, seed=seed) for seed in range(300)]

    explored = [one for one in decisions if one.reason is Reason.EXPLORE]
    assert 10 <= len(explored) <= 60
    assert {one.mode for one in explored} == {PlacementMode.DISAGGREGATED}


ON_CORES = {"transfer_address": "m0:1", "cpus": frozenset({0, 1}), "num_threads": 2}


@pytest.mark.parametrize(
    ("prefill", "mode"),
    [
        (ON_CORES, PlacementMode.LOCAL),
        (ON_CORES | {"num_threads": 1}, PlacementMode.LOCAL),
        (ON_CORES | {"transfer_address": "m1:1"}, PlacementMode.DISAGGREGATED),
        (ON_CORES | {"cpus": frozenset({2, 3})}, PlacementMode.DISAGGREGATED),
        # Room for the threads of both.
        (ON_CORES | {"cpus": frozenset({0, 1, 2, 3})}, PlacementMode.DISAGGREGATED),
        # Neither computes on cores.
        ({"transfer_address": "m0:1"}, PlacementMode.DISAGGREGATED),
    ],
)
def test_prefill_workers_on_the_decode_worker_s_cores_are_of_no_use(
    prefill: dict[str, object], mode: PlacementMode
) -> None:
    remote_is_faster = measured(prefill_tokens_per_s=50_000, pull_s=0.001)
    on_cores = replace(DECODE, **ON_CORES)  # type: ignore[arg-type]

    decision = decide(remote_is_faster, on_cores, replace(PREFILL, **prefill))  # type: ignore[arg-type]

    assert decision.mode is mode
    assert (decision.reason is Reason.SHARED_CORES) is (mode is PlacementMode.LOCAL)


def test_until_something_is_measured_shared_cores_do_not_matter() -> None:
    decode, prefill = (replace(one, **ON_CORES) for one in (DECODE, PREFILL))  # type: ignore[arg-type]

    assert decide(Estimates(), decode, prefill).reason is Reason.PREFILL_REMOTE


@pytest.mark.parametrize("margin", [0, 0.5])
def test_where_cores_are_shared_nothing_is_explored(margin: float) -> None:
    # No number that it could find would change the mode, and a prompt that is computed where
    # nothing is cached costs all streams of the machine.
    decode, prefill = (replace(one, **ON_CORES) for one in (DECODE, PREFILL))  # type: ignore[arg-type]
    settings = replace(SETTINGS, explore_ratio=1, local_margin=margin)

    decision = decide(measured(), decode, prefill, settings)

    assert decision.mode is PlacementMode.LOCAL
    assert decision.reason in (Reason.LOCAL_CHEAPER, Reason.SHARED_CORES)


def test_verdict_names_shared_cores() -> None:
    comparisons = Comparisons(min_needed=2)
    comparisons.add(Comparison(0.2, 0.1, shares_cores=True))
    comparisons.add(Comparison(0.2, 0.1, shares_cores=True))
    assert comparisons.verdict().advice is Advice.SHARED_CORES

    comparisons.add(Comparison(0.2, 0.1))

    assert comparisons.verdict().advice is Advice.DISAGGREGATE


@pytest.mark.parametrize(
    ("local_s", "remote_s", "advice"),
    [
        (0.1, 0.2, Advice.LOCAL),
        # Not by a margin: the steadier decode is worth it.
        (0.19, 0.2, Advice.DISAGGREGATE),
        (0.3, 0.2, Advice.DISAGGREGATE),
    ],
)
def test_verdict_says_whether_this_deployment_is_better_off_local(
    local_s: float, remote_s: float, advice: Advice
) -> None:
    comparisons = Comparisons(min_needed=10)
    for _ in range(9):
        comparisons.add(Comparison(local_s, remote_s))
    assert comparisons.verdict().advice is Advice.UNKNOWN

    comparisons.add(Comparison(local_s, remote_s))

    verdict = comparisons.verdict()
    assert (verdict.advice, verdict.num_placements) == (advice, 10)
    assert (verdict.local_s, verdict.remote_s) == pytest.approx((local_s, remote_s))
