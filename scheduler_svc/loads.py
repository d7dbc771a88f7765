"""What this scheduler has charged to each worker: known at once, before any heartbeat tells."""

from collections.abc import Mapping
from dataclasses import replace
from uuid import uuid4

from scheduler_svc.placement import Assignment, Decision
from scheduler_svc.workers import IDLE, ActiveLoad, RequestFacts


class LoadLedger:
    """Sums of the charges that are held, by the holder id of a worker.

    A worker's new incarnation starts with nothing: its predecessor's work died with it.
    """

    def __init__(self) -> None:
        self._charged: dict[str, ActiveLoad] = {}

    def charged(self, holder_id: str) -> ActiveLoad:
        return self._charged.get(holder_id, IDLE)

    @property
    def all(self) -> Mapping[str, ActiveLoad]:
        return self._charged

    @property
    def is_empty(self) -> bool:
        return not self._charged

    def charge(self, holder_id: str, load: ActiveLoad) -> "Charge":
        self.change(holder_id, IDLE, load)
        return Charge(self, holder_id, load)

    def change(self, holder_id: str, before: ActiveLoad, after: ActiveLoad) -> None:
        """Replace one charge among those of a worker."""
        total = self.charged(holder_id)
        total = ActiveLoad(
            total.num_requests - before.num_requests + after.num_requests,
            total.prefill_tokens - before.prefill_tokens + after.prefill_tokens,
            total.blocks - before.blocks + after.blocks,
        )
        assert min(total.num_requests, total.prefill_tokens, total.blocks) >= 0, "given back twice"
        if total == IDLE:
            self._charged.pop(holder_id, None)
        else:
            self._charged[holder_id] = total


class Charge:
    """One placement's load on one worker, until it is released."""

    def __init__(self, ledger: LoadLedger, holder_id: str, load: ActiveLoad) -> None:
        self._ledger = ledger
        self._holder_id = holder_id
        self._load = load

    def prompt_computed(self) -> None:
        self._become(replace(self._load, prefill_tokens=0))

    def release(self) -> None:
        """Doing it twice is harmless."""
        self._become(IDLE)

    def _become(self, load: ActiveLoad) -> None:
        before, self._load = self._load, load
        self._ledger.change(self._holder_id, before, load)


class HeldPlacement:
    """A decision whose load is charged until `release`."""

    def __init__(
        self,
        decision: Decision,
        facts: RequestFacts,
        ledger: LoadLedger,
        *,
        is_long: bool = False,
        knows_tiers: bool = False,
    ) -> None:
        self.placement_id = uuid4().hex
        self.decision = decision
        self.facts = facts
        # Counts against the quota of long prompts until its prompt is computed.
        self.is_long = is_long
        # Tiers that the decision does not name hold nothing of the prompt.
        self.knows_tiers = knows_tiers
        # When the first token was there, by the scheduler's clock.
        self.decoding_since: float | None = None
        self._prefill = _charge(ledger, decision.prefill) if decision.prefill else None
        self._decode = _charge(ledger, decision.decode)

    def prefill_done(self, now: float) -> None:
        """The first token exists: the prefill worker is free of the request, and no prompt
        tokens are owed by the decode worker. Doing it twice is harmless."""
        if self.decoding_since is None:
            self.decoding_since = now
        if self._prefill is not None:
            self._prefill.release()
        self._decode.prompt_computed()

    def release(self) -> None:
        """Give everything back. Doing it twice is harmless."""
        if self._prefill is not None:
            self._prefill.release()
        self._decode.release()


def _charge(ledger: LoadLedger, part: Assignment) -> Charge:
    return ledger.charge(part.worker.holder_id, part.charge)
