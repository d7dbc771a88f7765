"""Turns between tenants by deficit round robin, and the order within one tenant."""

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What the order depends on."""

    @property
    def tenant(self) -> str: ...

    # Smaller goes first.
    @property
    def priority(self) -> int: ...

    # Order of arrival.
    @property
    def arrival(self) -> int: ...

    @property
    def entered_at(self) -> float: ...

    # What it takes of its tenant's share, in tokens.
    @property
    def num_tokens(self) -> int: ...


QueuedT = TypeVar("QueuedT", bound=Queued)


class FairQueue(Generic[QueuedT]):
    """Tenants that wait get equal shares of tokens, however many requests each has.

    A tenant whose turn it is may spend what it has saved up; its first request waits until that
    is enough, and the next tenant's turn comes. Within a tenant smaller priorities go first, but
    whoever has waited for `max_overtaken_s` goes before all younger ones.
    """

    def __init__(self, *, quantum: int, max_overtaken_s: float) -> None:
        self._quantum = quantum
        self._max_overtaken_s = max_overtaken_s
        # In order of turns; those without requests have no savings and no entry.
        self._tenants: OrderedDict[str, _Tenant[QueuedT]] = OrderedDict()
        self._num_queued = 0

    def __len__(self) -> int:
        return self._num_queued

    def __iter__(self) -> Iterator[QueuedT]:
        for tenant in self._tenants.values():
            yield from tenant.queued

    @property
    def num_queued_by_tenant(self) -> dict[str, int]:
        return {name: len(tenant.queued) for name, tenant in self._tenants.items()}

    def add(self, queued: QueuedT) -> None:
        tenant = self._tenants.setdefault(queued.tenant, _Tenant())
        insort(tenant.queued, queued, key=_rank)
        self._num_queued += 1

    def remove(self, queued: QueuedT) -> None:
        """Take out one that got what it wanted, or that gave up."""
        tenant = self._tenants[queued.tenant]
        tenant.queued.remove(queued)
        self._num_queued -= 1
        if not tenant.queued:
            del self._tenants[queued.tenant]

    def next(self, now: float, is_eligible: Callable[[QueuedT], bool]) -> QueuedT | None:
        """Whose turn it is among the eligible; the answer stands until something changes."""
        candidates = {
            name: first
            for name, tenant in self._tenants.items()
            if (first := self._first(tenant, now, is_eligible)) is not None
        }
        while candidates:
            name = next(iter(self._tenants))
            tenant, first = self._tenants[name], candidates.get(name)
            if first is not None:
                if len(candidates) == 1 or tenant.savings >= first.num_tokens:
                    return first
                tenant.savings += self._quantum
            self._tenants.move_to_end(name)
        return None

    def charge(self, queued: QueuedT) -> None:
        """It was served: its tenant pays. Alone, a tenant owes nothing to anybody."""
        tenant = self._tenants[queued.tenant]
        tenant.savings = max(0, tenant.savings - queued.num_tokens)

    def youngest_of(self, tenant: str) -> QueuedT:
        return max(self._tenants[tenant].queued, key=lambda queued: queued.arrival)

    def _first(
        self, tenant: "_Tenant[QueuedT]", now: float, is_eligible: Callable[[QueuedT], bool]
    ) -> QueuedT | None:
        first = next(filter(is_eligible, tenant.queued), None)
        if first is None or first.priority == tenant.queued[-1].priority:
            # No priorities to overtake by: the first is the oldest too.
            return first
        oldest = min(filter(is_eligible, tenant.queued), key=lambda queued: queued.arrival)
        return oldest if now - oldest.entered_at >= self._max_overtaken_s else first


class _Tenant(Generic[QueuedT]):
    def __init__(self) -> None:
        self.queued: list[QueuedT] = []
        self.savings = 0


def _rank(queued: Queued) -> tuple[int, int]:
    return queued.priority, queued.arrival
