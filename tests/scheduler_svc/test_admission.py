"""The admission queue: order, bounds, cancellation, and nothing lost."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import DeadlineExceeded, InvalidRequest, QueueFull, WorkerUnavailable
from scheduler_svc.admission import Claim, PriorityClass
from tests.fakes import FakeClock
from tests.scheduler_svc.callers import Caller, Room, make_queue, settle


async def test_request_is_granted_at_once_when_there_is_room() -> None:
    room = Room(1)
    queue = make_queue(room)

    async with queue.admitted(1, Claim("m"), 1) as grant:
        assert (grant, room.num_free, queue.num_admitted) == (1, 0, 1)

    assert (room.num_free, queue.num_admitted, queue.num_waiting) == (1, 0, 0)


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


@pytest.mark.parametrize("quiet_s", [0, 3600])
async def test_full_queue_refuses_with_a_delay_from_the_recent_pace(quiet_s: float) -> None:
    clock = FakeClock()
    queue = make_queue(Room(1), clock, max_num_waiting=1)
    for _ in range(3):
        async with queue.admitted(1, Claim("m"), 1):
            clock.now += 4
    clock.now += quiet_s
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


@settings(max_examples=150)
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
