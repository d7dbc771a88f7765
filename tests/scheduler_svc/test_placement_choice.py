"""Placement: which worker is chosen, by prefix, by load and by cost."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import InvalidRequest, WorkerUnavailable
from scheduler_svc.cost import CostWeights, decode_cost, prefill_cost
from scheduler_svc.mode import PlacementMode
from scheduler_svc.placement import ModePolicy, PlacementSettings, place
from scheduler_svc.workers import ActiveLoad, Candidate, PrefixHit, RequestFacts, Role, WorkerView
from tests.scheduler_svc.placements import (
    DECODE,
    PREFILL,
    SETTINGS,
    decide,
    make_facts,
    make_worker,
    must_decide,
)


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
