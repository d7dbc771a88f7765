"""What a worker's service needs of its engine, and a request's run on it in the mesh's terms."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from engine.reports import EngineStats
from engine.request import (
    EngineError,
    EngineEvent,
    PrefillProgress,
    RemoteKvWanted,
    Request,
    RequestFailed,
    TokenOutput,
)
from mesh.errors import InternalError
from worker.translate import to_mesh_error

RunEvent = PrefillProgress | RemoteKvWanted | TokenOutput


class EnginePort(Protocol):
    """An engine that runs by itself; engine.loop.EngineLoop is the real one.

    Every call but iterating `generate` returns at once.
    """

    def generate(self, request: Request) -> AsyncGenerator[EngineEvent, None]:
        """Run a request; closing the generator aborts it."""
        ...

    def release_hold(self, request_id: str) -> None:
        """Give back what a `hold_blocks` request holds after its end, if anything."""
        ...

    def remote_kv_done(self, request_id: str, output_token_ids: Sequence[int] = ()) -> None: ...

    def remote_kv_failed(self, request_id: str, output_token_ids: Sequence[int] = ()) -> None: ...

    def load(self) -> EngineStats: ...


async def run_request(engine: EnginePort, request: Request) -> AsyncGenerator[RunEvent, None]:
    """The events of a request up to its last token; raises MeshError where there is none."""
    try:
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                if isinstance(event, RequestFailed):
                    raise event.error
                yield event
                if isinstance(event, TokenOutput) and event.is_last:
                    return
    except EngineError as error:
        raise to_mesh_error(error) from error
    raise InternalError("the engine left a request without an end")
