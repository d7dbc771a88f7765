"""Admission: who goes first."""

import asyncio
from functools import partial
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.admission import PriorityClass
from scheduler_svc.fair_queue import FairQueue
from tests.fakes import FakeClock
from tests.scheduler_svc.callers import (
    Caller,
    PaperEntry,
    Room,
    make_queue,
    served_in_order,
    settle,
)


async def test_equal_requests_are_served_in_order_of_arrival() -> None:
    queue = make_queue(Room(1))
    order: list[int] = []
    callers = [Caller(queue, on_grant=partial(order.append, n)) for n in range(5)]
    await settle()

    for caller in callers:
        await caller.leave()
        await settle()

    assert order == [0, 1, 2, 3, 4]


async def test_smaller_priority_goes_first() -> None:
    queue = make_queue(Room(1))
    holder = Caller(queue)
    await settle()
    late = Caller(queue, priority=5)
    urgent = Caller(queue, priority=-5)
    await settle()

    await holder.leave()
    await settle()

    assert urgent.granted.is_set()
    assert not late.granted.is_set()
    await urgent.leave()
    await late.leave()


async def test_waiting_long_enough_beats_any_priority() -> None:
    # KV-18
    clock = FakeClock()
    queue = make_queue(Room(1), clock, max_overtaken_s=30)
    holder = Caller(queue)
    await settle()
    patient = Caller(queue, priority=5)
    await settle()
    clock.now += 30
    urgent = Caller(queue, priority=-5)
    await settle()

    await holder.leave()
    await settle()

    assert patient.granted.is_set()
    assert not urgent.granted.is_set()
    await patient.leave()
    await urgent.leave()


async def test_tenant_with_many_requests_does_not_delay_one_with_few() -> None:
    queue = make_queue(Room(1), quantum=1)
    holder = Caller(queue)
    await settle()
    flood = [Caller(queue, tenant="flood") for _ in range(20)]
    await settle()
    few = [Caller(queue, tenant="few") for _ in range(3)]
    await settle()
    await holder.leave()

    order = await served_in_order(queue, [*flood, *few])

    assert max(order.index(one) for one in few) <= 6
    assert [one for one in order if one in flood] == flood


async def test_shares_are_counted_in_tokens_not_in_requests() -> None:
    queue = make_queue(Room(1), quantum=100)
    holder = Caller(queue)
    await settle()
    large = [Caller(queue, tenant="large", num_tokens=400) for _ in range(10)]
    small = [Caller(queue, tenant="small", num_tokens=100) for _ in range(40)]
    await settle()
    await holder.leave()

    order = await served_in_order(queue, [*large, *small])

    # After half of all tokens, each has had about half of them.
    half = order[:25]
    assert 4 <= sum(one in large for one in half) <= 6


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=12), min_size=2, max_size=4))
def test_tenants_that_wait_never_fall_behind_by_more_than_a_turn(costs: list[list[int]]) -> None:
    quantum, now = 100, 0.0
    queue: FairQueue[PaperEntry] = FairQueue(quantum=quantum, max_overtaken_s=30)
    arrivals = count()
    for tenant, own in enumerate(costs):
        for cost in own:
            queue.add(PaperEntry(str(tenant), next(arrivals), cost))
    served = dict.fromkeys(map(str, range(len(costs))), 0)
    bound = quantum + max(cost for own in costs for cost in own)

    while len(queue.num_queued_by_tenant) == len(costs):
        entry = queue.next(now, lambda one: True)
        assert entry is not None
        # The answer stands until something changes.
        assert queue.next(now, lambda one: True) is entry
        queue.charge(entry)
        queue.remove(entry)
        served[entry.tenant] += entry.num_tokens
        assert max(served.values()) - min(served.values()) <= 2 * bound


async def test_offline_requests_wait_for_online_ones_but_not_for_ever() -> None:
    clock = FakeClock()
    queue = make_queue(Room(1), clock, max_overtaken_s=30)
    holder = Caller(queue)
    await settle()
    offline = Caller(queue, priority_class=PriorityClass.OFFLINE)
    await settle()
    online = [Caller(queue) for _ in range(3)]
    await settle()

    await holder.leave()
    await settle()
    assert online[0].granted.is_set()
    await online[0].leave()
    await settle()
    assert online[1].granted.is_set()
    clock.now += 30
    await online[1].leave()
    await settle()

    assert offline.granted.is_set()
    await offline.leave()
    await online[2].leave()


async def test_request_that_may_not_start_yet_holds_nobody_back() -> None:
    allowed: set[int] = {1}
    queue = make_queue(Room(4), may_start=allowed.__contains__)
    long, short = Caller(queue, 3), Caller(queue, 1)
    await settle()
    assert (long.granted.is_set(), short.granted.is_set()) == (False, True)

    allowed.add(3)
    await short.leave()
    await settle()

    assert long.granted.is_set()
    await long.leave()


# KV-18
async def test_large_prompt_starts_within_the_bound_under_a_flow_of_small_ones() -> None:
    clock = FakeClock()
    queue = make_queue(Room(4), clock, max_overtaken_s=30)
    flow = [Caller(queue, 1, priority=-1) for _ in range(4)]
    await settle()
    entered_at = clock.now
    large = Caller(queue, 4, priority=0)
    await settle()

    while not large.granted.is_set():
        # One a second leaves, and the next one is there already.
        flow.append(Caller(queue, 1, priority=-1))
        await settle()
        clock.now += 1
        running = [one for one in flow if one.granted.is_set() and not one.task.done()]
        if running:
            await running[0].leave()
        await settle()

    # The bound, and the time in which those before it leave.
    assert clock.now - entered_at <= 30 + 4
    await large.leave()
    for one in flow:
        await one.leave()


async def test_large_request_is_not_overtaken_by_small_ones_of_its_lane() -> None:
    # KV-18
    queue = make_queue(Room(4))
    holders = [Caller(queue) for _ in range(3)]
    await settle()
    large = Caller(queue, 3)
    small = Caller(queue, 1)
    await settle()
    assert not small.granted.is_set()

    for holder in holders:
        await holder.leave()
    await settle()

    assert large.granted.is_set()
    assert small.granted.is_set()
    await large.leave()
    await small.leave()


async def test_lanes_do_not_wait_for_each_other() -> None:
    queue = make_queue(Room(2))
    large = Caller(queue, 3, lane="large")
    await settle()

    small = Caller(queue, 1, lane="small")
    await settle()

    assert small.granted.is_set()
    await small.leave()
    large.task.cancel()
    await asyncio.wait([large.task])


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=20), seed=st.randoms())
def test_order_within_a_lane_survives_any_order_of_leaving(sizes: list[int], seed: object) -> None:
    asyncio.run(_order_is_kept(sizes, seed))


async def _order_is_kept(sizes: list[int], seed: object) -> None:
    queue = make_queue(Room(4), max_num_waiting=50)
    order: list[int] = []
    callers = [
        Caller(queue, size, on_grant=partial(order.append, n)) for n, size in enumerate(sizes)
    ]
    await settle()

    while remaining := [c for c in callers if c.granted.is_set() and not c.leaving.is_set()]:
        await seed.choice(remaining).leave()  # type: ignore[attr-defined]
        await settle()

    assert order == list(range(len(sizes)))
