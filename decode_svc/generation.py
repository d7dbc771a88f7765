"""One request on the decode engine: with KV from a prefill worker, or from its own prompt."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from decode_svc.fallbacks import ComputeHere
from decode_svc.kv_holder import RemoteKv
from decode_svc.kv_import import KvImporter
from engine.request import PrefillProgress, RemoteKvWanted, Request, TokenOutput
from mesh.telemetry import Span, Stopwatch, use_span
from worker.engine_port import EnginePort, RunEvent, run_request
from worker.spans import add_chunk_event
from worker.streams import ActiveStreams


@dataclass
class Transfer:
    """What moving a request's KV has come to so far."""

    is_running: bool = False
    payload_bytes: int = 0
    # Spent on an attempt that had to be given up, blocks and all.
    lost_s: float = 0.0
    # Went by while the prompt was still being computed: it held nobody up.
    overlap_s: float = 0.0
    # Came with the KV.
    first_token_ids: list[int] = field(default_factory=list)


class Generator:
    """Runs requests. A KV handle changes where the prompt's KV comes from and nothing else."""

    def __init__(self, engine: EnginePort, streams: ActiveStreams, importer: KvImporter) -> None:
        self._engine = engine
        self._streams = streams
        self._importer = importer

    async def generate(
        self,
        request: Request,
        remote: RemoteKv | None,
        transfer: Transfer,
        span: Span,
    ) -> AsyncGenerator[list[TokenOutput], None]:
        """Yield tokens, each time all that are there; raises MeshError.

        Closing it ends everything: the request, its blocks, the handle.
        """
        if remote is not None:
            stopwatch = Stopwatch()
            imported = replace(
                request,
                output_token_ids=[*request.output_token_ids],
                remote_kv=True,
                remote_token=remote.awaits_first_token,
            )
            try:
                async with aclosing(self._import(imported, remote, transfer, span)) as batches:
                    async for tokens in batches:
                        yield tokens
                return
            except ComputeHere:
                transfer.is_running = False
                transfer.lost_s = max(0.0, stopwatch.elapsed_s - transfer.overlap_s)
                transfer.overlap_s = 0.0
                request = replace(
                    request,
                    # The first attempt's id may belong to blocks in quarantine.
                    request_id=f"{request.request_id}/again",
                    output_token_ids=[*request.output_token_ids, *transfer.first_token_ids],
                )
        async with self._streams.open(run_request(self._engine, request)) as events:
            async for batch in events:
                if tokens := _tokens(batch, span):
                    yield tokens

    async def _import(
        self, request: Request, remote: RemoteKv, transfer: Transfer, span: Span
    ) -> AsyncGenerator[list[TokenOutput], None]:
        """Go on from remote KV; raises ComputeHere, before any token, where there is none."""
        async with self._importer.claim(request.request_id, remote) as claim:
            try:
                if not claim.covers(request.num_remote_tokens):
                    await claim.wait_for_first_token()
                    raise ComputeHere
                async with self._streams.open(run_request(self._engine, request)) as events:
                    async for batch in events:
                        for event in batch:
                            if isinstance(event, RemoteKvWanted):
                                transfer.is_running = True
                                with use_span(span):
                                    claim.start_import(event, events.fail)
                        if tokens := _tokens(batch, span):
                            transfer.is_running = False
                            transfer.payload_bytes = claim.payload_bytes
                            transfer.overlap_s = claim.overlap_s(request.submitted_at)
                            yield tokens
            finally:
                transfer.first_token_ids = claim.first_token_ids
                transfer.overlap_s = claim.overlap_s(request.submitted_at)


def _tokens(batch: Sequence[RunEvent], span: Span) -> list[TokenOutput]:
    for event in batch:
        if isinstance(event, PrefillProgress):
            add_chunk_event(span, event)
    return [event for event in batch if isinstance(event, TokenOutput)]
