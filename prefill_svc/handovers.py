"""Prefills whose handle is out before they have finished, and those who follow them."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from mesh.errors import KvLeaseExpired


@dataclass(frozen=True)
class Progress:
    """How far a prefill has got."""

    num_computed_tokens: int
    # Set when it has finished.
    first_token_id: int | None = None
    # By time.perf_counter.
    sampled_at: float = 0.0


class _Handover:
    def __init__(self) -> None:
        self.progress = Progress(0)
        self.is_over = False
        self.changed = asyncio.Event()

    def notify(self) -> None:
        """Wake all who wait now; who comes later waits for the next change."""
        self.changed.set()
        self.changed = asyncio.Event()


class Handovers:
    """Tells followers of a handle what is computed, for as long as its lease lasts."""

    def __init__(self) -> None:
        self._handovers: dict[str, _Handover] = {}

    def __len__(self) -> int:
        return len(self._handovers)

    def begin(self, handle_id: str) -> None:
        self._handovers[handle_id] = _Handover()

    def advance(self, handle_id: str, progress: Progress) -> None:
        """Harmless after the end."""
        if (handover := self._handovers.get(handle_id)) is not None:
            handover.progress = progress
            handover.notify()

    def end(self, handle_id: str) -> None:
        """The blocks may be gone from now on."""
        if (handover := self._handovers.pop(handle_id, None)) is not None:
            handover.is_over = True
            handover.notify()

    async def follow(self, handle_id: str) -> AsyncGenerator[Progress, None]:
        """What is computed now, then each change, up to the first token.

        A slow follower sees the latest change only. Raises KvLeaseExpired if it ends before.
        """
        handover = self._handovers.get(handle_id)
        seen: Progress | None = None
        while handover is not None and not handover.is_over:
            changed = handover.changed
            if handover.progress is not seen:
                seen = handover.progress
                yield seen
                if seen.first_token_id is not None:
                    return
            else:
                await changed.wait()
        raise KvLeaseExpired(f"the prefill of {handle_id} is over")
