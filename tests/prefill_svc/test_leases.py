"""Leases: held blocks are given back exactly once, in time, whatever the order."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from mesh.errors import KvLeaseExpired
from prefill_svc.leases import LeaseTable

LEASE_S = 30.0


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lease_ends_at_release_and_the_second_release_is_harmless() -> None:
    released: list[str] = []
    leases = LeaseTable(released.append, lease_s=LEASE_S, clock=FakeClock())
    leases.grant("h1")

    answers = [leases.release("h1"), leases.release("h1"), leases.release("never granted")]

    assert answers == [True, False, False]
    assert released == ["h1"]


def test_release_after_the_lease_says_that_it_was_over() -> None:
    released: list[str] = []
    clock = FakeClock()
    leases = LeaseTable(released.append, lease_s=LEASE_S, clock=clock)
    leases.grant("h1")
    clock.now += LEASE_S

    assert leases.release("h1") is False
    assert released == ["h1"]


def test_expired_lease_is_not_stuck_behind_a_renewed_one() -> None:
    # field.md 2.8, hole (a): the first in line is alive and hides those that are not.
    released: list[str] = []
    clock = FakeClock()
    leases = LeaseTable(released.append, lease_s=LEASE_S, clock=clock)
    leases.grant("renewed")
    leases.grant("forgotten")
    clock.now += 20
    leases.renew("renewed")
    clock.now += 15

    leases.expire()

    assert released == ["forgotten"]
    assert len(leases) == 1


def test_renewal_after_the_end_is_refused() -> None:
    clock = FakeClock()
    leases = LeaseTable(lambda handle_id: None, lease_s=LEASE_S, clock=clock)
    leases.grant("h1")
    clock.now += LEASE_S

    with pytest.raises(KvLeaseExpired, match="h1"):
        leases.renew("h1")


async def test_reaper_ends_a_lease_that_nobody_asks_for() -> None:
    released: list[str] = []
    async with LeaseTable(released.append, lease_s=0.02) as leases:
        leases.grant("h1")

        async with asyncio.timeout(20):
            await leases.wait_until_empty()

    assert released == ["h1"]


class LeaseMachine(RuleBasedStateMachine):
    """Any order of grants, renewals, releases and waiting, against a plain dictionary."""

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.released: list[str] = []
        self.leases = LeaseTable(self.released.append, lease_s=LEASE_S, clock=self.clock)
        self.ends: dict[str, float] = {}
        self.num_granted = 0

    @rule(target=handles, count=st.integers(1, 3))
    def grant(self, count: int) -> object:
        names = [f"h{self.num_granted + index}" for index in range(count)]
        self.num_granted += count
        for name in names:
            self.leases.grant(name)
            self.ends[name] = self.clock.now + LEASE_S
        return multiple(*names)

    @rule(handle=handles)
    def renew(self, handle: str) -> None:
        if self.is_live(handle):
            self.leases.renew(handle)
            self.ends[handle] = self.clock.now + LEASE_S
        else:
            with pytest.raises(KvLeaseExpired):
                self.leases.renew(handle)

    @rule(handle=handles)
    def release(self, handle: str) -> None:
        assert self.leases.release(handle) == self.is_live(handle)
        self.ends[handle] = self.clock.now

    @rule(seconds=st.integers(0, 40))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        self.leases.expire()

    def is_live(self, handle: str) -> bool:
        return self.ends[handle] > self.clock.now

    @invariant()
    def exactly_the_ended_ones_are_released_once(self) -> None:
        ended = [handle for handle in self.ends if not self.is_live(handle)]
        assert sorted(self.released) == sorted(ended)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=40, stateful_step_count=30)
