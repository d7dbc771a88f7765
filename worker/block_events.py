"""What the engine did to its blocks, on its way to those who are interested."""

import asyncio
from collections.abc import Callable

from engine.block_pool import BlockEvents

# Enough for the tokens of the step that filled them to leave the process.
_DELAY_S = 0.005


class BlockEventRelay:
    """Lets tokens go first: blocks that were filled are told of a moment later.

    Storing and announcing them takes the cores that a first token needs on its way to the
    client. Evictions are told at once, since the blocks are about to be overwritten, and with
    them everything that came before. Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[BlockEvents], None]] = []
        self._waiting: list[BlockEvents] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, listener: Callable[[BlockEvents], None]) -> None:
        """Tell it of all events from now on."""
        self._listeners.append(listener)

    def offer(self, events: BlockEvents) -> None:
        self._waiting.append(events)
        if events.removed:
            self._tell()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self._tell)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for events in waiting:
            for listener in self._listeners:
                listener(events)
