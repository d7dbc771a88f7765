"""What a way of moving blocks must do."""

from collections.abc import Sequence
from typing import Protocol

from kv_transfer_svc.runs import BlockRun
from kv_transfer_svc.segments import Segment


class Transport(Protocol):
    """Moves runs of blocks between two segments."""

    async def copy(self, source: Segment, destination: Segment, runs: Sequence[BlockRun]) -> int:
        """Return the bytes that were written, when the last of them is.

        The destination is not written to any more once the call has ended, in whichever way:
        cancelling it waits for the part in flight. Raises KvTransferFailed when not all arrived.
        """
        ...
