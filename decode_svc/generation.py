"""One request on the decode engine: with KV from a prefill worker, or from its own prompt."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from decode_svc.kv_import import KvImporter, RemoteKv
from engine.request import RemoteKvWanted, Request, TokenOutput
from mesh.telemetry import Span, Stopwatch, use_span
from worker.engine_port import EnginePort, RunEvent, run_request
from worker.streams import ActiveStreams


@dataclass
class Transfer:
    """What moving a request's KV has come to so far."""

    is_running: bool = False
    payload_bytes: int = 0
    # Spent on an attempt that had to be given up, blocks and all.
    lost_s: float = 0.0


class _ComputeHere(Exception):
    """Other workers' KV is of no use to the request any more."""


class Generator:
    """Runs requests. A KV handle changes where the prompt's KV comes from and nothing else."""

    def __init__(self, engine: EnginePort, streams: ActiveStreams, importer: KvImporter) -> None:
        self._engine = engine
        self._streams = streams
        self._importer = importer

    async def generate(
        self, request: Request, remote: RemoteKv | None, transfer: Transfer, span: Span
    ) -> AsyncGenerator[list[TokenOutput], None]:
        """Yield tokens, each time all that are there; raises MeshError.

        Closing it ends everything: the request, its blocks, the handle.
        """
        if remote is not None:
            stopwatch = Stopwatch()
            imported = replace(request, remote_kv=True)
            try:
                async with aclosing(self._import(imported, remote, transfer, span)) as batches:
                    async for tokens in batches:
                        yield tokens
                return
            except _ComputeHere:
                transfer.is_running = False
                transfer.lost_s = stopwatch.elapsed_s
                # The first attempt's id may belong to blocks in quarantine.
                request = replace(request, request_id=f"{request.request_id}/again")
        async with self._streams.open(run_request(self._engine, request)) as events:
            async for batch in events:
                if tokens := _tokens(batch):
                    yield tokens

    async def _import(
        self, request: Request, remote: RemoteKv, transfer: Transfer, span: Span
    ) -> AsyncGenerator[list[TokenOutput], None]:
        """Go on from remote KV; raises _ComputeHere, before any token, where there is none."""
        async with self._importer.claim(request.request_id, remote) as claim:
            if not claim.covers(request.num_tokens - 1):
                raise _ComputeHere
            async with self._streams.open(run_request(self._engine, request)) as events:
                async for batch in events:
                    for event in batch:
                        if isinstance(event, RemoteKvWanted):
                            transfer.is_running = True
                            with use_span(span):
                                claim.start_import(event, lambda: events.fail(_ComputeHere()))
                    if tokens := _tokens(batch):
                        transfer.is_running = False
                        transfer.payload_bytes = claim.payload_bytes
                        yield tokens


def _tokens(batch: Sequence[RunEvent]) -> list[TokenOutput]:
    return [event for event in batch if isinstance(event, TokenOutput)]
