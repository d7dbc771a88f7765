"""Who failed gets no placements for a growing time; one placement finds out whether it is well."""

import pytest

from mesh import metrics
from scheduler_svc.breakers import Breakers, BreakerSettings, BreakerState, Failure

WORKER = "decode-0@1"
SETTINGS = BreakerSettings(max_failures=3, first_open_s=1.0, max_open_s=8.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breakers(clock: Clock) -> Breakers:
    return Breakers(SETTINGS, clock)


def open_by_loss(breakers: Breakers) -> None:
    breakers.failed(WORKER, object(), Failure.LOST)
    assert breakers.state(WORKER) is BreakerState.OPEN


def probe(breakers: Breakers) -> object:
    assert breakers.admits(WORKER)
    placement = object()
    breakers.placed(WORKER, placement)
    return placement


def test_consecutive_faults_open_it_and_a_success_in_between_does_not_let_them(
    breakers: Breakers,
) -> None:
    for _ in range(2):
        breakers.failed(WORKER, object(), Failure.FAULTY)
    breakers.succeeded(WORKER, object())
    for _ in range(2):
        breakers.failed(WORKER, object(), Failure.FAULTY)
    assert breakers.admits(WORKER)

    breakers.failed(WORKER, object(), Failure.FAULTY)

    assert breakers.state(WORKER) is BreakerState.OPEN
    assert not breakers.admits(WORKER)
    assert breakers.admits("decode-1@1")


def test_one_lost_connection_is_enough(breakers: Breakers) -> None:
    open_by_loss(breakers)


def test_streams_that_break_together_are_one_failure(breakers: Breakers, clock: Clock) -> None:
    for _ in range(16):
        breakers.failed(WORKER, object(), Failure.LOST)

    clock.now += SETTINGS.first_open_s

    assert breakers.state(WORKER) is BreakerState.HALF_OPEN


def test_half_open_admits_one_placement_and_its_success_closes(
    breakers: Breakers, clock: Clock
) -> None:
    open_by_loss(breakers)
    clock.now += 1.0

    placement = probe(breakers)

    assert not breakers.admits(WORKER)
    breakers.succeeded(WORKER, object())  # one of before
    assert breakers.state(WORKER) is BreakerState.HALF_OPEN
    breakers.succeeded(WORKER, placement)
    assert breakers.state(WORKER) is BreakerState.CLOSED
    assert breakers.admits(WORKER)


def test_each_probe_that_fails_doubles_the_time_up_to_a_bound(
    breakers: Breakers, clock: Clock
) -> None:
    open_by_loss(breakers)
    for open_s in (1.0, 2.0, 4.0, 8.0, 8.0):
        clock.now += 0.99 * open_s
        assert breakers.state(WORKER) is BreakerState.OPEN
        clock.now += 0.02 * open_s
        breakers.failed(WORKER, probe(breakers), Failure.FAULTY)


def test_probe_without_a_verdict_makes_way_for_another(breakers: Breakers, clock: Clock) -> None:
    open_by_loss(breakers)
    clock.now += 1.0
    placement = probe(breakers)

    breakers.left(WORKER, placement)

    assert breakers.state(WORKER) is BreakerState.HALF_OPEN
    breakers.succeeded(WORKER, probe(breakers))
    assert breakers.state(WORKER) is BreakerState.CLOSED


def test_time_to_the_next_probe_is_that_of_the_first_open_breaker(
    breakers: Breakers, clock: Clock
) -> None:
    assert breakers.next_probe_in_s() is None
    open_by_loss(breakers)
    clock.now += 0.25
    breakers.failed("decode-1@1", object(), Failure.LOST)

    assert breakers.next_probe_in_s() == pytest.approx(0.75)
    clock.now += 1.0
    assert breakers.next_probe_in_s() is None


def test_new_process_starts_with_a_clean_record(breakers: Breakers) -> None:
    open_by_loss(breakers)

    assert breakers.admits("decode-0@2")
    breakers.registered(["decode-0@2"])
    assert breakers.states == {}
    assert breakers.state(WORKER) is BreakerState.CLOSED


def test_process_that_leaves_the_registry_and_comes_back_is_not_forgiven(
    breakers: Breakers, clock: Clock
) -> None:
    open_by_loss(breakers)
    clock.now += 1.0
    breakers.failed(WORKER, probe(breakers), Failure.LOST)

    # Frozen: its record expires, and it writes another one when it thaws.
    breakers.registered(["decode-1@1"])
    assert breakers.states == {}
    clock.now += 60.0
    breakers.registered(["decode-1@1"])
    breakers.registered(["decode-1@1", WORKER])

    assert breakers.states == {WORKER: BreakerState.HALF_OPEN}
    breakers.failed(WORKER, probe(breakers), Failure.LOST)
    clock.now += 3.9
    assert breakers.state(WORKER) is BreakerState.OPEN
    clock.now += 0.2
    assert breakers.state(WORKER) is BreakerState.HALF_OPEN


def test_process_that_stays_away_is_forgotten(breakers: Breakers, clock: Clock) -> None:
    open_by_loss(breakers)
    breakers.registered([])
    clock.now += 599.0
    breakers.registered([])
    assert breakers.state(WORKER) is BreakerState.HALF_OPEN
    clock.now += 2.0
    breakers.registered([])

    assert breakers.state(WORKER) is BreakerState.CLOSED


def test_openings_are_counted_by_failure(breakers: Breakers) -> None:
    def openings() -> float:
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in metrics.render()[0].decode().splitlines()
            if line.startswith('pdmesh_scheduler_breaker_openings_total{failure="lost"}')
        )

    before = openings()
    open_by_loss(breakers)

    assert openings() == before + 1
