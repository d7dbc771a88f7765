"""Callers of the admission queue, and the room that they wait for."""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from mesh.errors import InvalidRequest
from scheduler_svc.admission import AdmissionQueue, Claim, PriorityClass, QueueSettings
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


async def served_in_order(queue: AdmissionQueue[int, int], callers: list[Caller]) -> list[Caller]:
    """One at a time, until all were served."""
    order: list[Caller] = []
    while len(order) < len(callers):
        await settle()
        [current] = [one for one in callers if one.granted.is_set() and one not in order]
        order.append(current)
        await current.leave()
    return order
