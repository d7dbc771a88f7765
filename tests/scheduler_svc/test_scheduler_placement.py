"""Placement: cost, mode, room and the reasons given."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import ContextLengthExceeded, InvalidRequest, WorkerUnavailable
from scheduler_svc.cost import CostWeights, decode_cost, prefill_cost
from scheduler_svc.mode import PlacementMode, Reason
from scheduler_svc.placement import Decision, ModePolicy, PlacementSettings, place
from scheduler_svc.workers import ActiveLoad, Candidate, PrefixHit, RequestFacts, Role, WorkerView

SETTINGS = PlacementSettings()


def make_worker(worker_id: str, role: Role = Role.DECODE, **changes: object) -> WorkerView:
    worker = WorkerView(
        worker_id=worker_id,
        holder_id=f"{worker_id}@1",
        role=role,
        address=f"{worker_id}:1",
        model="smol",
        layout_fingerprint="f1",
        block_size=16,
        num_blocks=100,
        max_model_len=1024,
    )
    return replace(worker, **changes)  # type: ignore[arg-type]


def make_facts(
    num_prompt_tokens: int = 160, max_tokens: int = 16, **changes: object
) -> RequestFacts:
    return replace(
        RequestFacts("smol", num_prompt_tokens, max_tokens),
        **changes,  # type: ignore[arg-type]
    )


def decide(
    workers: list[WorkerView],
    facts: RequestFacts | None = None,
    hits: dict[str, PrefixHit] | None = None,
    settings: PlacementSettings = SETTINGS,
    seed: int = 0,
) -> Decision | None:
    return place(facts or make_facts(), workers, hits or {}, settings, Random(seed))


def must_decide(
    workers: list[WorkerView],
    facts: RequestFacts | None = None,
    hits: dict[str, PrefixHit] | None = None,
    settings: PlacementSettings = SETTINGS,
    seed: int = 0,
) -> Decision:
    decision = decide(workers, facts, hits, settings, seed)
    assert decision is not None
    return decision


PREFILL = make_worker("p0", Role.PREFILL)
DECODE = make_worker("d0")


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


def test_prefill_worker_with_the_longest_prefix_wins_when_loads_are_equal() -> None:
    workers = [make_worker(f"p{n}", Role.PREFILL) for n in range(4)] + [DECODE]
    hits = {"p1@1": PrefixHit(3), "p2@1": PrefixHit(9), "p3@1": PrefixHit(2, host_blocks=5)}

    for seed in range(10):
        decision = must_decide(workers, hits=hits, seed=seed)

        assert decision.prefill is not None
        assert decision.prefill.worker.worker_id == "p2"
        assert decision.prefill.num_cached_tokens == 144


def test_hits_of_a_former_incarnation_do_not_count() -> None:
    # KV-23
    decision = must_decide([PREFILL, DECODE], hits={"p0@0": PrefixHit(9), "d0@0": PrefixHit(9)})

    assert decision.prefill is not None
    assert decision.prefill.num_cached_tokens == 0
    assert decision.decode.num_cached_tokens == 0


def test_hot_prefix_moves_on_when_its_worker_is_far_behind() -> None:
    hits = {"p0@1": PrefixHit(9)}
    busy = replace(PREFILL, charged=ActiveLoad(num_requests=3, prefill_tokens=64))
    swamped = replace(PREFILL, charged=ActiveLoad(num_requests=9, prefill_tokens=400))
    idle = make_worker("p1", Role.PREFILL)

    stays = must_decide([busy, idle, DECODE], hits=hits)
    moves = must_decide([swamped, idle, DECODE], hits=hits)

    assert stays.prefill is not None
    assert moves.prefill is not None
    assert stays.prefill.worker.worker_id == "p0"
    assert moves.prefill.worker.worker_id == "p1"


def test_least_loaded_decode_worker_wins() -> None:
    loaded = [
        make_worker(f"d{n}", reported=ActiveLoad(num_requests=n, blocks=10 * n)) for n in (3, 1, 2)
    ]

    assert must_decide(loaded).decode.worker.worker_id == "d1"


def test_own_charges_count_before_any_heartbeat_tells() -> None:
    charged = replace(DECODE, charged=ActiveLoad(num_requests=1, blocks=11))

    chosen = {
        must_decide([charged, make_worker("d1")], seed=s).decode.worker.worker_id for s in range(10)
    }

    assert chosen == {"d1"}


def test_ties_are_broken_at_random_and_evenly() -> None:
    workers = [make_worker(f"d{n}") for n in range(4)]
    random = Random(5)
    counts = dict.fromkeys(["d0", "d1", "d2", "d3"], 0)

    for _ in range(400):
        decision = place(make_facts(), workers, {}, SETTINGS, random)
        assert decision is not None
        counts[decision.decode.worker.worker_id] += 1

    assert min(counts.values()) > 60


def test_tiers_are_credited_by_their_distance() -> None:
    facts, weights = make_facts(320), CostWeights()

    def cost(hit: PrefixHit) -> float:
        return prefill_cost(Candidate(PREFILL, hit), facts, 0, weights)

    assert cost(PrefixHit()) == 20
    assert cost(PrefixHit(device_blocks=8)) == 12
    assert cost(PrefixHit(host_blocks=8)) == 14
    assert cost(PrefixHit(disk_blocks=8)) == 18
    assert cost(PrefixHit(4, 2, 2)) == 14


def test_prefill_credit_decays_with_the_excess_load() -> None:
    facts, weights = make_facts(160), CostWeights(credit_decay=1.0)
    # 160 tokens more than the least loaded one: as much again as the request.
    behind = replace(PREFILL, charged=ActiveLoad(1, prefill_tokens=160))

    assert prefill_cost(Candidate(behind, PrefixHit(8)), facts, 0, weights) == 20 - 8 / 2
    assert prefill_cost(Candidate(behind, PrefixHit(8)), facts, 160, weights) == 20 - 8


def test_decode_cost_counts_blocks_prompts_and_requests() -> None:
    busy = replace(DECODE, reported=ActiveLoad(num_requests=3, prefill_tokens=32, blocks=40))

    cost = decode_cost(Candidate(busy, PrefixHit(4)), make_facts(160), CostWeights())

    assert cost == (40 + 10 - 4) + 2 + 3


loads = st.builds(
    ActiveLoad,
    num_requests=st.integers(0, 40),
    prefill_tokens=st.integers(0, 4000),
    blocks=st.integers(0, 120),
)
worker_views = st.builds(
    make_worker,
    worker_id=st.uuids().map(str),
    role=st.sampled_from(Role),
    layout_fingerprint=st.sampled_from(["f1", "f2"]),
    model=st.sampled_from(["smol", "other"]),
    num_blocks=st.integers(1, 120),
    max_model_len=st.sampled_from([64, 512, 2048]),
    reported=loads,
    charged=loads,
)


@given(
    workers=st.lists(worker_views, max_size=8),
    facts=st.builds(make_facts, st.integers(1, 2000), st.integers(1, 500)),
    mode=st.sampled_from(ModePolicy),
    data=st.data(),
)
def test_every_decision_is_one_that_its_workers_can_carry_out(
    workers: list[WorkerView], facts: RequestFacts, mode: ModePolicy, data: st.DataObject
) -> None:
    hits = {
        worker.holder_id: PrefixHit(*data.draw(st.tuples(*[st.integers(0, 60)] * 3)))
        for worker in workers
    }
    settings = replace(SETTINGS, mode=mode)

    try:
        decision = decide(workers, facts, hits, settings)
    except (WorkerUnavailable, InvalidRequest):
        return

    if decision is None:
        assert any(worker.charged.num_requests for worker in workers)
        return
    decode = decision.decode.worker
    assert decode.role is Role.DECODE
    assert (decision.prefill is None) == (decision.mode is PlacementMode.LOCAL)
    parts = [decision.decode] + ([decision.prefill] if decision.prefill else [])
    for part in parts:
        worker, charge = part.worker, part.charge
        assert worker.model == facts.model
        assert worker.layout_fingerprint == decode.layout_fingerprint
        assert worker.charged.num_requests < settings.max_num_seqs
        assert part.num_cached_tokens < facts.num_prompt_tokens
        assert charge.num_requests == 1
        assert charge.blocks >= 1
        assert facts.num_prompt_tokens < worker.max_model_len
        assert facts.num_prompt_tokens < worker.num_blocks * worker.block_size
    computing = decision.prefill or decision.decode
    assert computing.charge.prefill_tokens == facts.num_prompt_tokens - computing.num_cached_tokens


def test_colder_tiers_of_the_machine_attract_all_its_workers() -> None:
    near = make_worker("p0", Role.PREFILL, transfer_address="here:1")
    far = make_worker("p1", Role.PREFILL, transfer_address="there:1")
    hits = {"here:1": PrefixHit(0, 4, 2), "p0@1": PrefixHit(2)}

    decision = must_decide([near, far, DECODE], hits=hits)

    assert decision.prefill is not None
    assert decision.prefill.worker.worker_id == "p0"
    assert decision.prefill.num_cached_tokens == 6 * 16
    # What has to be fetched takes room on the device.
    assert decision.prefill.charge.blocks == 10 - 2


@given(device=st.integers(0, 9), host=st.integers(0, 9), disk=st.integers(0, 9))
def test_extending_a_hit_counts_each_block_once(device: int, host: int, disk: int) -> None:
    extended = PrefixHit(device).extended(PrefixHit(0, host, disk))

    assert extended.device_blocks == device
    assert extended.num_blocks == max(device, host + disk)
    assert extended.disk_blocks <= disk


def test_burst_of_one_hot_prefix_is_copied_to_more_workers_as_its_holder_falls_behind() -> None:
    workers = [make_worker(f"p{n}", Role.PREFILL, num_blocks=10_000) for n in range(4)]
    decode = make_worker("d0", num_blocks=10_000)
    settings = PlacementSettings(max_num_seqs=1000)
    charged = {worker.holder_id: ActiveLoad() for worker in workers}
    hits = {"p0@1": PrefixHit(9)}
    chosen: list[str] = []
    for seed in range(60):
        views = [replace(worker, charged=charged[worker.holder_id]) for worker in workers]
        decision = must_decide([*views, decode], make_facts(160), dict(hits), settings, seed)
        assert decision.prefill is not None
        holder_id = decision.prefill.worker.holder_id
        charged[holder_id] = charged[holder_id] + decision.prefill.charge
        hits[holder_id] = PrefixHit(9)
        chosen.append(holder_id)

    # First where it is, then everywhere.
    assert chosen[0] == "p0@1"
    assert set(chosen[:3]) == {"p0@1"}
    assert set(chosen) == {f"p{n}@1" for n in range(4)}


def test_prefix_has_no_pull_beyond_the_balancing_threshold() -> None:
    weights = CostWeights(credit_decay=0.0, kvcache_balancing_threshold=2.0)
    behind = make_worker("p0", Role.PREFILL, charged=ActiveLoad(3, 330, 0))
    facts = make_facts(160)

    pulled = prefill_cost(Candidate(behind, PrefixHit(9)), facts, 20, weights)
    not_pulled = prefill_cost(Candidate(behind, PrefixHit(9)), facts, 0, weights)

    assert not_pulled == pytest.approx(330 / 16 + 10)
    assert pulled == pytest.approx(330 / 16 + 10 - 9)
