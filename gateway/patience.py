"""A bound on waits that follow each other closely."""

import asyncio
from types import TracebackType
from typing import Self

# A timer that is so late says that this process was frozen, or its machine asleep. What came
# meanwhile is still to be read: the wait may go on for as long as that.
_ASLEEP_S = 1.0


class Patience:
    """`asyncio.timeout` for one wait after another, all with the same timer.

    A token's way through the gateway has several waits, each of them short. A timer that is
    made and cancelled for each costs more than the wait itself; this one is made when it is
    needed and looks again when its time comes. One wait at a time.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        # Of the wait under way.
        self._ends_at: float | None = None
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._is_over = False

    def for_(self, timeout_s: float) -> Self:
        """The bound of the next wait: `with patience.for_(1): await ...` raises TimeoutError."""
        self._ends_at = self._loop.time() + timeout_s
        return self

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "only a task can be cancelled"
        assert self._ends_at is not None, "`for_` comes first"
        self._task = task
        self._num_cancels = task.cancelling()
        self._is_over = False
        if self._timer is not None and self._timer.when() > self._ends_at:
            self.close()
        if self._timer is None:
            self._timer = self._loop.call_at(self._ends_at, self._look)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task, self._ends_at = self._task, None, None
        assert task is not None, "entered before"
        if (
            self._is_over
            # Somebody else's cancellation goes first.
            and task.uncancel() <= self._num_cancels
            and exc_type is asyncio.CancelledError
        ):
            raise TimeoutError from exc

    def close(self) -> None:
        """Forget the timer; the next wait makes another one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        timer, self._timer = self._timer, None
        if self._ends_at is None or self._task is None:
            return
        now = self._loop.time()
        if timer is not None and now - timer.when() > _ASLEEP_S:
            self._ends_at = max(self._ends_at, now + _ASLEEP_S)
        if now < self._ends_at:
            self._timer = self._loop.call_at(self._ends_at, self._look)
        else:
            self._is_over = True
            self._task.cancel()
