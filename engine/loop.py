"""An engine in a thread of its own, for asyncio callers."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from engine.block_pool import BlockEvents
from engine.engine import Engine
from engine.reports import EngineStats, StepReport
from engine.request import (
    EngineError,
    EngineEvent,
    EngineStopped,
    RemoteKvWanted,
    Request,
    RequestFailed,
    TokenOutput,
    TooManyWaiting,
)

logger = logging.getLogger(__name__)

# The shortest that leaves the event loop time to wake up.
_FIRST_TOKEN_PAUSE_S = 50e-6


class _Stream:
    """The way of one request's events to its caller.

    Belongs to the event loop; the engine thread only passes it on. The queue needs no bound:
    a request causes no more events than it may have tokens.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.events: asyncio.Queue[EngineEvent] = asyncio.Queue()
        self.is_closed = False


class EngineLoop:
    """Runs the engine's steps in a thread and hands their events to the event loop.

    Calls never wait for a step: they leave a command that the thread carries out before its next
    step. With nothing to do the thread sleeps until a command comes.
    """

    def __init__(
        self,
        engine: Engine,
        on_block_events: Callable[[BlockEvents], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        """`on_block_events` is called on the event loop; for evicted blocks, it is scheduled
        before they are overwritten. `on_thread_start` is called first thing on the engine's
        thread."""
        self._engine = engine
        self._on_block_events = on_block_events
        self._clock = clock
        self._on_thread_start = on_thread_start
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        # The event loop's own: callers that read.
        self._open: set[_Stream] = set()
        # The thread's own: where the events of the requests in the engine go.
        self._streams: dict[str, _Stream] = {}
        # Shared, under the condition.
        self._wake = threading.Condition()
        self._commands: list[Callable[[], object]] = []
        self._is_stopping = False
        # Why the thread is over.
        self._end: str | None = None
        # Replaced as a whole by the thread, so that reading needs no lock.
        self._load = engine.load()
        self._busy_since: float | None = None

    def observe_steps(self, observe: Callable[[StepReport], None]) -> None:
        """Report every step from now on, on the engine's thread."""
        self._engine.on_step = observe

    def start(self) -> None:
        """Start the thread; call it on the event loop that will call `generate`."""
        self._loop = asyncio.get_running_loop()
        if self._on_block_events is not None:
            on_block_events = self._on_block_events
            self._engine.on_block_events = lambda events: self._call(on_block_events, events)
        self._thread.start()

    async def stop(self) -> None:
        """End after the current step, fail what is still running, and close the engine."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self._engine.close()

    async def generate(self, request: Request) -> AsyncGenerator[EngineEvent, None]:
        """Yield a request's events up to its last token; raises an EngineError if it fails.

        Closing the generator aborts the request, which takes effect before the next step. What
        an event hands over to the caller belongs to the engine again if the caller closes
        without having read it.
        """
        self._engine.check(request)
        if self._end is not None:
            raise EngineStopped(self._end)
        if len(self._open) >= self._engine.max_num_requests:
            raise TooManyWaiting(f"{len(self._open)} requests are running or waiting already")
        request.submitted_at = self._clock()
        stream = _Stream(request.request_id)
        self._open.add(stream)
        try:
            self._submit(partial(self._add, request, stream))
            is_over = False
            while not is_over:
                event = await stream.events.get()
                if isinstance(event, RequestFailed):
                    raise event.error
                is_over = isinstance(event, TokenOutput) and event.is_last
                yield event
        finally:
            self._close(stream)

    def release_hold(self, request_id: str) -> None:
        """Give back the blocks of a finished `hold_blocks` request; harmless if it has none."""
        self._submit(partial(self._engine.release_hold, request_id))

    def remote_kv_done(self, request_id: str, output_token_ids: Sequence[int] = ()) -> None:
        """Answer RemoteKvWanted: the blocks are written."""
        self._submit(partial(self._engine.remote_kv_done, request_id, output_token_ids))

    def tiered_kv_done(self, request_id: str, num_blocks: int) -> None:
        """Answer RemoteKvWanted of a `tiered_kv` request: so many blocks are written."""
        self._submit(partial(self._engine.tiered_kv_done, request_id, num_blocks))

    def remote_kv_late(self, request_id: str) -> None:
        """Do without an answer to RemoteKvWanted, which must still come."""
        self._submit(partial(self._engine.remote_kv_late, request_id))

    def remote_kv_failed(self, request_id: str, output_token_ids: Sequence[int] = ()) -> None:
        """Answer RemoteKvWanted: the blocks will not come, and nothing writes to them."""
        self._submit(partial(self._engine.remote_kv_failed, request_id, output_token_ids))

    def load(self) -> EngineStats:
        """What the engine was doing after its last step."""
        return self._load

    @property
    def is_running(self) -> bool:
        """False once the loop was stopped or has crashed."""
        return self._end is None and self._thread.is_alive()

    @property
    def last_step_age_s(self) -> float:
        """How long ago the engine last finished a step or had nothing to do; infinite after
        its end. Grows without limit if a step hangs."""
        if not self.is_running:
            return math.inf
        busy_since = self._busy_since
        return 0.0 if busy_since is None else self._clock() - busy_since

    # On the event loop.

    def _submit(self, command: Callable[[], object]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _deliver(self, deliveries: list[tuple[_Stream, EngineEvent]]) -> None:
        for stream, event in deliveries:
            if stream.is_closed:
                self._take_back(event)
            else:
                stream.events.put_nowait(event)

    def _close(self, stream: _Stream) -> None:
        self._open.discard(stream)
        stream.is_closed = True
        while not stream.events.empty():
            self._take_back(stream.events.get_nowait())
        self._submit(partial(self._drop, stream))

    def _take_back(self, event: EngineEvent) -> None:
        """Do for an event that nobody will read what its reader would have had to do."""
        match event:
            case RemoteKvWanted():
                self.remote_kv_failed(event.request_id)
            case TokenOutput() if event.held_block_ids:
                self.release_hold(event.request_id)

    def _fail_open_streams(self) -> None:
        for stream in self._open:
            stream.events.put_nowait(RequestFailed(stream.request_id, EngineStopped(self._end)))

    # On the engine's thread.

    def _run(self) -> None:
        end = "the engine was stopped"
        try:
            if self._on_thread_start is not None:
                self._on_thread_start()
            while self._carry_out_commands():
                events = self._engine.step()
                if self._engine.is_stalled:
                    self._busy_since = None
                self._load = self._engine.load()
                self._pass_on(events)
        except Exception as error:
            logger.exception("engine crashed")
            end = f"the engine crashed: {error!r}"
        with self._wake:
            self._end = end
        self._call(self._fail_open_streams)

    def _carry_out_commands(self) -> bool:
        """Wait until there is something to do, and do what was asked; False: stop."""
        with self._wake:
            if self._engine.is_stalled:
                self._wake.wait_for(lambda: self._commands or self._is_stopping)
            self._busy_since = self._clock()
            commands, self._commands = self._commands, []
            if self._is_stopping:
                return False
        for command in commands:
            command()
        return True

    def _add(self, request: Request, stream: _Stream) -> None:
        try:
            self._engine.add_request(request)
        except EngineError as error:
            self._call(self._deliver, [(stream, RequestFailed(request.request_id, error))])
        else:
            self._streams[request.request_id] = stream

    def _drop(self, stream: _Stream) -> None:
        # The id may be another stream's by now.
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._engine.abort(stream.request_id)

    def _pass_on(self, events: list[EngineEvent]) -> None:
        deliveries: list[tuple[_Stream, EngineEvent]] = []
        for event in events:
            deliveries.append((self._streams[event.request_id], event))
            if isinstance(event, RequestFailed) or (
                isinstance(event, TokenOutput) and event.is_last
            ):
                del self._streams[event.request_id]
        if deliveries:
            self._call(self._deliver, deliveries)
            if any(_is_first_token(event) for event in events):
                # The event loop wants the interpreter for it, and not only once the next step
                # is prepared: of all tokens, a client waits for the first one longest.
                time.sleep(_FIRST_TOKEN_PAUSE_S)

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        """Have the event loop call back: once per step, however many tokens it brought."""
        assert self._loop is not None, "start() comes first"
        self._loop.call_soon_threadsafe(callback, *arguments)


def _is_first_token(event: EngineEvent) -> bool:
    return isinstance(event, TokenOutput) and event.timings_so_far is not None
