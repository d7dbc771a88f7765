"""The admission queue: order, bounds, cancellation, and nothing lost."""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import DeadlineExceeded, InvalidRequest, QueueFull, WorkerUnavailable
from scheduler_svc.admission import AdmissionQueue, Claim, PriorityClass, QueueSettings
from scheduler_svc.fair_queue import FairQueue
from tests.fakes import FakeClock


@dataclass
class Room:
    """Seats to give away; a request is the number of seats that it needs."""

    num_free: int
    granted: list[int] = field(default_factory=list)

    def grant(self, size: int) -> int | None:
        if size < 0:
            raise InvalidRequest("no such size")
        if size > self.num_free:
            return None
        self.num_free -= size
        self.granted.append(size)
        return size

    def release(self, size: int) -> None:
        self.num_free += size


@dataclass(eq=False)
class PaperEntry:
    tenant: str
    arrival: int
    num_tokens: int
    priority: int = 0
    entered_at: float = 0.0


class Caller:
    """One request: it enters, and holds what it gets until it is told to leave."""

    def __init__(
        self,
        queue: AdmissionQueue[int, int],
        size: int = 1,
        *,
        lane: Hashable = "m",
        priority: int = 0,
        tenant: str = "",
        priority_class: PriorityClass = PriorityClass.ONLINE,
        num_tokens: int = 0,
        timeout_s: float = 60,
        on_grant: Callable[[], None] = lambda: None,
    ) -> None:
        self.size = size
        self.lane = lane
        self.granted = asyncio.Event()
        self.leaving = asyncio.Event()
        self._on_grant = on_grant
        claim = Claim(lane, tenant, priority_class, priority, num_tokens or max(size, 1))
        self.task = asyncio.create_task(self._run(queue, claim, timeout_s))

    async def _run(self, queue: AdmissionQueue[int, int], claim: Claim, timeout_s: float) -> None:
        async with queue.admitted(self.size, claim, timeout_s):
            self.granted.set()
            self._on_grant()
            await self.leaving.wait()

    async def leave(self) -> None:
        self.leaving.set()
        await self.task


async def settle() -> None:
    """Let every task run until it waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)


def make_queue(
    room: Room,
    clock: FakeClock | None = None,
    may_start: Callable[[int], bool] = lambda size: True,
    **changes: float,
) -> AdmissionQueue[int, int]:
    bounds = QueueSettings(**changes)  # type: ignore[arg-type]
    return AdmissionQueue(room.grant, room.release, bounds, clock or FakeClock(), may_start)


async def test_request_is_granted_at_once_when_there_is_room() -> None:
    room = Room(1)
    queue = make_queue(room)

    async with queue.admitted(1, Claim("m"), 1) as grant:
        assert (grant, room.num_free, queue.num_admitted) == (1, 0, 1)

    assert (room.num_free, queue.num_admitted, queue.num_waiting) == (1, 0, 0)


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


async def served_in_order(queue: AdmissionQueue[int, int], callers: list[Caller]) -> list[Caller]:
    """One at a time, until all were served."""
    order: list[Caller] = []
    while len(order) < len(callers):
        await settle()
        [current] = [one for one in callers if one.granted.is_set() and one not in order]
        order.append(current)
        await current.leave()
    return order


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


@settings(max_examples=60, deadline=None)
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


async def test_full_queue_turns_the_least_entitled_away() -> None:
    queue = make_queue(Room(1), max_num_waiting=3)
    holder = Caller(queue)
    await settle()
    first = [Caller(queue, tenant="flood") for _ in range(2)]
    await settle()
    job = Caller(queue, tenant="few", priority_class=PriorityClass.OFFLINE)
    await settle()

    last = Caller(queue, tenant="flood")
    await settle()
    with pytest.raises(QueueFull):
        await job.task
    few = Caller(queue, tenant="few")
    await settle()
    with pytest.raises(QueueFull):
        await last.task

    assert queue.num_waiting == 3
    await holder.leave()
    await asyncio.gather(*(one.leave() for one in [*first, few]))


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


async def test_full_queue_refuses_with_a_delay_from_the_recent_pace() -> None:
    clock = FakeClock()
    queue = make_queue(Room(1), clock, max_num_waiting=1)
    for _ in range(3):
        async with queue.admitted(1, Claim("m"), 1):
            clock.now += 4
    holder, waiter = Caller(queue), Caller(queue)
    await settle()

    with pytest.raises(QueueFull) as caught:
        async with queue.admitted(1, Claim("m"), 1):
            pass

    # One ends every 4 s, and two must end first.
    assert caught.value.retry_after_s == pytest.approx(8.0)
    assert queue.num_waiting == 1
    await holder.leave()
    await waiter.leave()


async def test_queue_that_is_full_for_one_lane_lets_another_one_through() -> None:
    queue = make_queue(Room(1), max_num_waiting=1)
    waiter = Caller(queue, 2, lane="large")
    await settle()

    async with queue.admitted(1, Claim("small"), 1):
        assert queue.num_waiting == 1

    waiter.task.cancel()
    await asyncio.wait([waiter.task])


async def test_cancelled_waiter_leaves_and_its_successor_is_served() -> None:
    room = Room(4)
    queue = make_queue(room)
    holder = Caller(queue, 2)
    await settle()
    large = Caller(queue, 3)
    small = Caller(queue, 1)
    await settle()

    large.task.cancel()
    await settle()

    assert small.granted.is_set()
    await small.leave()
    await holder.leave()
    assert (queue.num_waiting, room.num_free) == (0, 4)


async def test_grant_that_meets_the_waiters_cancellation_is_given_back() -> None:
    room = Room(1)
    queue = make_queue(room)
    holder = Caller(queue)
    await settle()
    waiter = Caller(queue)
    await settle()

    # The grant is made while the waiter's cancellation is under way, in both orders.
    waiter.task.cancel()
    holder.leaving.set()
    await settle()
    assert room.num_free == 1

    holder = Caller(queue)
    await settle()
    waiter = Caller(queue)
    await settle()
    room.num_free += 1
    queue.wake()
    waiter.task.cancel()
    await settle()

    assert waiter.task.cancelled()
    assert (queue.num_admitted, room.num_free) == (1, 1)
    await holder.leave()


async def test_waiter_whose_time_is_up_gets_deadline_exceeded() -> None:
    queue = make_queue(Room(0))

    with pytest.raises(DeadlineExceeded):
        async with queue.admitted(1, Claim("m"), 0.01):
            pass

    assert queue.num_waiting == 0


async def test_error_in_the_block_releases_the_grant_and_passes_through() -> None:
    room = Room(1)
    queue = make_queue(room)

    with pytest.raises(TimeoutError):
        async with queue.admitted(1, Claim("m"), 1):
            raise TimeoutError("of the caller")

    assert room.num_free == 1


async def test_request_that_waits_in_vain_gets_the_error_and_blocks_nobody() -> None:
    room = Room(1)
    queue = make_queue(room)

    with pytest.raises(InvalidRequest):
        async with queue.admitted(-1, Claim("m"), 1):
            pass

    async with queue.admitted(1, Claim("m"), 1):
        assert room.num_free == 0


async def test_more_room_from_elsewhere_wakes_the_waiters() -> None:
    room = Room(0)
    queue = make_queue(room)
    callers = [Caller(queue) for _ in range(3)]
    await settle()

    room.num_free = 2
    queue.wake()
    await settle()

    assert [caller.granted.is_set() for caller in callers] == [True, True, False]
    for caller in callers:
        await caller.leave()


async def test_closing_answers_those_who_wait_and_those_who_come_but_lets_the_others_finish() -> (
    None
):
    room = Room(1)
    queue = make_queue(room)
    holder, waiter = Caller(queue), Caller(queue)
    await settle()

    queue.close(WorkerUnavailable("draining"))
    idle = asyncio.create_task(queue.wait_idle())
    await settle()

    with pytest.raises(WorkerUnavailable):
        await waiter.task
    with pytest.raises(WorkerUnavailable):
        await Caller(queue).task
    assert not idle.done()
    await holder.leave()
    await idle
    assert room.num_free == 1


operations = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.integers(1, 4), st.sampled_from("ab"), st.integers(-1, 1)),
        st.tuples(st.just("leave"), st.integers(0, 30), st.none(), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.none(), st.none()),
        st.tuples(st.just("settle"), st.none(), st.none(), st.none()),
        st.tuples(st.just("age"), st.none(), st.none(), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(operations=operations)
def test_whatever_happens_all_grants_return_and_nobody_is_forgotten(
    operations: list[tuple[str, int, str, int]],
) -> None:
    asyncio.run(_run(operations))


async def _run(operations: list[tuple[str, int, str, int]]) -> None:
    room = Room(4)
    clock = FakeClock()
    queue = make_queue(room, clock, max_num_waiting=5, max_overtaken_s=30)
    callers: list[Caller] = []
    for operation, number, lane, priority in operations:
        if operation == "enter":
            callers.append(Caller(queue, number, lane=lane, priority=priority))
        elif operation == "settle":
            await settle()
        elif operation == "age":
            clock.now += 20
        elif callers:
            caller = callers[number % len(callers)]
            if operation == "leave":
                caller.leaving.set()
            else:
                caller.task.cancel()
        assert room.num_free >= 0
        assert queue.num_waiting <= 5

    for caller in callers:
        caller.leaving.set()
    # No wake-up is lost: without any more help, everyone who still waits gets a turn.
    results = await asyncio.gather(*(caller.task for caller in callers), return_exceptions=True)

    assert (room.num_free, queue.num_waiting, queue.num_admitted) == (4, 0, 0)
    for caller, result in zip(callers, results, strict=True):
        assert caller.granted.is_set() or isinstance(result, QueueFull | asyncio.CancelledError)


@settings(max_examples=60, deadline=None)
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
