"""Placement: mode, room, refusals and the reasons given."""

from dataclasses import replace

import pytest

from mesh.errors import ContextLengthExceeded, InvalidRequest, WorkerUnavailable
from scheduler_svc.mode import PlacementMode, Reason
from scheduler_svc.placement import ModePolicy
from scheduler_svc.workers import ActiveLoad, PrefixHit
from tests.scheduler_svc.placements import (
    DECODE,
    PREFILL,
    SETTINGS,
    decide,
    make_facts,
    make_worker,
    must_decide,
)


def test_long_prompt_goes_to_a_prefill_and_a_decode_worker() -> None:
    decision = must_decide([PREFILL, DECODE])

    assert decision.mode is PlacementMode.DISAGGREGATED
    assert decision.reason is Reason.PREFILL_REMOTE
    assert decision.prefill is not None
    assert (decision.prefill.worker.worker_id, decision.decode.worker.worker_id) == ("p0", "d0")


@pytest.mark.parametrize(
    ("num_prompt_tokens", "mode"),
    [
        (1, PlacementMode.LOCAL),
        (31, PlacementMode.LOCAL),
        (32, PlacementMode.DISAGGREGATED),
    ],
)
def test_prompt_below_the_threshold_is_computed_by_the_decode_worker(
    num_prompt_tokens: int, mode: PlacementMode
) -> None:
    decision = must_decide([PREFILL, DECODE], make_facts(num_prompt_tokens))

    assert decision.mode is mode
    assert (decision.reason is Reason.ISL_BOUNDING) == (mode is PlacementMode.LOCAL)
    assert (decision.prefill is None) == (mode is PlacementMode.LOCAL)


def test_only_the_uncached_part_counts_towards_the_threshold() -> None:
    decision = must_decide([PREFILL, DECODE], make_facts(160), {"d0@1": PrefixHit(9)})

    assert decision.mode is PlacementMode.LOCAL
    assert decision.decode.num_cached_tokens == 144


def test_ratio_keeps_a_prompt_remote_that_is_short_but_wholly_uncached() -> None:
    settings = replace(SETTINGS, local_prefill_max_tokens=2048, local_prefill_max_ratio=0.7)

    cold = must_decide([PREFILL, DECODE], settings=settings)
    warm = must_decide([PREFILL, DECODE], hits={"d0@1": PrefixHit(4)}, settings=settings)

    assert (cold.mode, warm.mode) == (PlacementMode.DISAGGREGATED, PlacementMode.LOCAL)


def test_without_a_prefill_worker_the_decode_worker_does_all() -> None:
    decision = must_decide([DECODE])

    assert decision.mode is PlacementMode.LOCAL
    assert decision.reason is Reason.NO_PREFILL_WORKER


def test_workers_with_different_layouts_are_never_paired() -> None:
    decision = must_decide([replace(PREFILL, layout_fingerprint="f2"), DECODE])

    assert decision.reason is Reason.NO_PREFILL_WORKER


def test_prefill_worker_whose_window_is_too_small_is_not_used() -> None:
    decision = must_decide([replace(PREFILL, max_model_len=160), DECODE], make_facts(160))

    assert decision.reason is Reason.NO_PREFILL_WORKER


def test_mode_can_be_forced_to_local() -> None:
    settings = replace(SETTINGS, mode=ModePolicy.LOCAL)

    decision = must_decide([PREFILL, DECODE], settings=settings)

    assert (decision.mode, decision.reason) == (PlacementMode.LOCAL, Reason.FORCED)


def test_mode_can_be_forced_to_disaggregated() -> None:
    settings = replace(SETTINGS, mode=ModePolicy.DISAGGREGATED)

    decision = must_decide([PREFILL, DECODE], make_facts(1), settings=settings)

    assert (decision.mode, decision.reason) == (PlacementMode.DISAGGREGATED, Reason.FORCED)


def test_forced_disaggregation_skips_a_decode_worker_that_nobody_can_feed() -> None:
    settings = replace(SETTINGS, mode=ModePolicy.DISAGGREGATED)
    lonely = make_worker("d1", layout_fingerprint="f2")

    chosen = {
        must_decide([PREFILL, DECODE, lonely], settings=settings, seed=seed).decode.worker.worker_id
        for seed in range(10)
    }

    assert chosen == {"d0"}


def test_forced_disaggregation_fails_without_a_prefill_worker() -> None:
    settings = replace(SETTINGS, mode=ModePolicy.DISAGGREGATED)

    with pytest.raises(WorkerUnavailable, match="no prefill worker"):
        decide([DECODE], settings=settings)


def test_no_decode_worker_alive_is_an_error_with_a_delay() -> None:
    with pytest.raises(WorkerUnavailable, match="no decode worker") as caught:
        decide([PREFILL])

    assert caught.value.retry_after_s is not None


def test_excluded_workers_are_not_chosen() -> None:
    facts = make_facts(excluded_worker_ids=frozenset({"p0", "d0"}))

    decision = must_decide([PREFILL, DECODE, make_worker("d1")], facts)

    assert decision.decode.worker.worker_id == "d1"
    assert decision.reason is Reason.NO_PREFILL_WORKER


def test_excluding_the_last_decode_worker_is_unavailable_and_not_invalid() -> None:
    with pytest.raises(WorkerUnavailable):
        decide([PREFILL, DECODE], make_facts(excluded_worker_ids=frozenset({"d0"})))


def test_workers_of_another_model_are_ignored() -> None:
    decision = must_decide(
        [replace(PREFILL, model="other"), DECODE, make_worker("d1", model="other")]
    )

    assert decision.decode.worker.worker_id == "d0"
    assert decision.prefill is None


def test_request_beyond_every_window_names_both_numbers() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"1000 prompt tokens and 25 .* 1024 tokens"):
        decide([PREFILL, DECODE], make_facts(1000, 25))


def test_request_that_fills_the_window_is_placed() -> None:
    assert decide([PREFILL, DECODE], make_facts(1000, 24)) is not None


def test_request_beyond_every_cache_is_refused_rather_than_queued() -> None:
    # KV-12
    small = make_worker("d0", num_blocks=32, max_model_len=2048)

    with pytest.raises(InvalidRequest, match="holds 512 tokens"):
        decide([small], make_facts(600, 1))


def test_request_whose_output_may_outgrow_the_cache_runs_as_far_as_it_goes() -> None:
    # KV-12
    small = make_worker("d0", num_blocks=32, max_model_len=2048)

    assert must_decide([small], make_facts(400, 400)).decode.worker is small


def test_request_goes_to_the_only_worker_that_is_large_enough() -> None:
    small = make_worker("small", num_blocks=5)
    large = make_worker("large", reported=ActiveLoad(num_requests=20, blocks=90))

    assert must_decide([small, large]).decode.worker.worker_id == "large"


def test_full_workers_make_the_request_wait() -> None:
    settings = replace(SETTINGS, max_num_seqs=2)
    full = replace(DECODE, charged=ActiveLoad(num_requests=2))

    assert decide([PREFILL, full], settings=settings) is None
    assert decide([PREFILL, full, make_worker("d1")], settings=settings) is not None


def test_full_prefill_workers_make_the_request_wait_instead_of_going_local() -> None:
    settings = replace(SETTINGS, max_num_seqs=2)
    full = replace(PREFILL, charged=ActiveLoad(num_requests=2))

    assert decide([full, DECODE], settings=settings) is None


def test_blocks_charged_to_a_worker_limit_what_it_takes() -> None:
    # 160 + 16 tokens are 11 blocks.
    almost_full = replace(DECODE, charged=ActiveLoad(num_requests=1, blocks=89))
    full = replace(DECODE, charged=ActiveLoad(num_requests=1, blocks=90))

    assert decide([almost_full]) is not None
    assert decide([full]) is None


def test_cached_blocks_need_no_room() -> None:
    full = replace(DECODE, charged=ActiveLoad(num_requests=1, blocks=90))

    assert decide([full], hits={"d0@1": PrefixHit(5)}) is not None


def test_output_beyond_the_reserve_is_not_charged() -> None:
    decision = must_decide([DECODE], make_facts(160, 800))

    assert decision.decode.charge.blocks == (160 + SETTINGS.reserved_output_tokens) // 16


def test_charges_say_who_computes_the_prompt() -> None:
    remote = must_decide([PREFILL, DECODE], hits={"p0@1": PrefixHit(4)})
    local = must_decide([DECODE], hits={"d0@1": PrefixHit(4)})

    assert remote.prefill is not None
    assert remote.prefill.charge == ActiveLoad(1, prefill_tokens=96, blocks=6)
    assert remote.decode.charge == ActiveLoad(1, prefill_tokens=0, blocks=11)
    assert local.decode.charge == ActiveLoad(1, prefill_tokens=96, blocks=7)


def test_whole_cached_prompt_still_leaves_one_token_to_compute() -> None:
    # KV-05
    for num_prompt_tokens in (15, 16, 17, 32, 33):
        decision = must_decide([DECODE], make_facts(num_prompt_tokens), {"d0@1": PrefixHit(50)})

        assert decision.decode.num_cached_tokens == (num_prompt_tokens - 1) // 16 * 16
        assert decision.decode.charge.prefill_tokens >= 1
