"""Prefills whose handle is out before they have finished, and those who wait for their token."""

import asyncio
from dataclasses import dataclass

from mesh.errors import KvLeaseExpired


@dataclass(frozen=True)
class SampledToken:
    """What a prefill ends with."""

    token_id: int
    # By time.perf_counter.
    sampled_at: float = 0.0


class Handovers:
    """Tells those who wait for it the first token of a handle, for as long as its lease lasts."""

    def __init__(self) -> None:
        self._tokens: dict[str, asyncio.Future[SampledToken]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def begin(self, handle_id: str) -> None:
        self._tokens[handle_id] = asyncio.get_running_loop().create_future()

    def finish(self, handle_id: str, token: SampledToken) -> None:
        """The prefill has. Harmless after the end."""
        if (awaited := self._tokens.get(handle_id)) is not None:
            awaited.set_result(token)

    def end(self, handle_id: str) -> None:
        """The blocks may be gone from now on."""
        if (awaited := self._tokens.pop(handle_id, None)) is not None:
            awaited.cancel()

    async def first_token(self, handle_id: str) -> SampledToken:
        """Wait for it; raises KvLeaseExpired if the handover ends before."""
        if (awaited := self._tokens.get(handle_id)) is not None:
            await asyncio.wait({awaited})
            if not awaited.cancelled():
                return awaited.result()
        raise KvLeaseExpired(f"the prefill of {handle_id} is over")
