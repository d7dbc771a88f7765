"""Charges: counted at once, moved at the first token, given back once."""

from dataclasses import replace
from random import Random

import pytest

from scheduler_svc.loads import HeldPlacement, LoadLedger
from scheduler_svc.placement import Decision, PlacementSettings, place
from scheduler_svc.workers import ActiveLoad, RequestFacts, Role, WorkerView

DECODE = WorkerView("d0", "1", "d0@1", Role.DECODE, "d0:1", "smol", "f1", 16, 100, 1024)
FACTS = RequestFacts("smol", 160, 16)
PREFILL = replace(DECODE, worker_id="p0", holder_id="p0@1", role=Role.PREFILL)


def make_decision(*workers: WorkerView) -> Decision:
    decision = place(FACTS, workers, {}, PlacementSettings(), Random(0))
    assert decision is not None
    return decision


def test_disaggregated_placement_charges_both_workers() -> None:
    ledger = LoadLedger()

    HeldPlacement(make_decision(PREFILL, DECODE), FACTS, ledger)

    assert ledger.charged("p0@1") == ActiveLoad(1, 160, 10)
    assert ledger.charged("d0@1") == ActiveLoad(1, 0, 11)


def test_first_token_frees_the_prefill_worker() -> None:
    ledger = LoadLedger()
    held = HeldPlacement(make_decision(PREFILL, DECODE), FACTS, ledger)

    held.prefill_done(now=1.0)
    held.prefill_done(now=1.0)

    assert ledger.charged("p0@1") == ActiveLoad()
    assert ledger.charged("d0@1") == ActiveLoad(1, 0, 11)


def test_first_token_of_a_local_placement_ends_its_prompt_load() -> None:
    ledger = LoadLedger()
    held = HeldPlacement(make_decision(DECODE), FACTS, ledger)
    assert ledger.charged("d0@1") == ActiveLoad(1, 160, 11)

    held.prefill_done(now=1.0)

    assert ledger.charged("d0@1") == ActiveLoad(1, 0, 11)


@pytest.mark.parametrize("has_first_token", [False, True])
def test_release_gives_everything_back_once(has_first_token: bool) -> None:
    ledger = LoadLedger()
    other = HeldPlacement(make_decision(PREFILL, DECODE), FACTS, ledger)
    held = HeldPlacement(make_decision(PREFILL, DECODE), FACTS, ledger)
    if has_first_token:
        held.prefill_done(now=1.0)

    held.release()
    held.release()
    held.prefill_done(now=1.0)

    assert ledger.charged("p0@1") == ActiveLoad(1, 160, 10)
    other.release()
    assert ledger.is_empty


def test_first_token_after_release_charges_nothing() -> None:
    ledger = LoadLedger()
    held = HeldPlacement(make_decision(DECODE), FACTS, ledger)
    held.release()

    held.prefill_done(now=1.0)

    assert ledger.is_empty
