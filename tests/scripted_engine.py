"""An engine whose every event the test decides, behind the workers' EnginePort."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from engine.reports import EngineStats
from engine.request import (
    EngineError,
    EngineEvent,
    FinishReason,
    PrefillProgress,
    RemoteKvWanted,
    Request,
    RequestTimings,
    TokenOutput,
)
from engine.sampling import TokenLogprobs


class ScriptedRun:
    """One request on a scripted engine."""

    def __init__(self, request: Request) -> None:
        self.request = request
        # Set when the service has closed the generator.
        self.closed = asyncio.Event()
        self.events: asyncio.Queue[EngineEvent | BaseException] = asyncio.Queue()

    def progress(
        self,
        num_computed_tokens: int,
        block_ids: tuple[int, ...] = (),
        generations: tuple[int, ...] = (),
    ) -> None:
        self.events.put_nowait(
            PrefillProgress(self.request.request_id, num_computed_tokens, block_ids, generations)
        )

    def want_remote_kv(
        self, first_block_index: int, *block_ids: int, keys: tuple[bytes, ...] = ()
    ) -> None:
        self.events.put_nowait(
            RemoteKvWanted(self.request.request_id, first_block_index, block_ids, keys)
        )

    def token(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        self.events.put_nowait(TokenOutput(self.request.request_id, token_id, logprobs))

    def first_token(self, token_id: int, *, num_cached_tokens: int) -> None:
        """A first token that is not the last."""
        self.events.put_nowait(
            TokenOutput(
                self.request.request_id,
                token_id,
                timings_so_far=RequestTimings(wait_s=0.001, prefill_s=0.002),
                num_cached_tokens=num_cached_tokens,
            )
        )

    def hold(self, token_id: int, *block_ids: int, num_cached_tokens: int = 0) -> None:
        """The first token of a prefill, whose blocks stay."""
        self.events.put_nowait(
            TokenOutput(
                self.request.request_id,
                token_id,
                timings=RequestTimings(wait_s=0.001, prefill_s=0.002),
                num_cached_tokens=num_cached_tokens,
                held_block_ids=block_ids,
                num_held_tokens=self.request.num_tokens,
            )
        )

    def finish(
        self,
        token_id: int,
        reason: FinishReason = FinishReason.LENGTH,
        timings: RequestTimings | None = None,
    ) -> None:
        self.events.put_nowait(
            TokenOutput(
                self.request.request_id,
                token_id,
                finish_reason=reason,
                matched_stop_token_id=token_id if reason is FinishReason.STOP else None,
                timings=timings or RequestTimings(decode_s=0.003),
            )
        )

    def fail(self, error: BaseException) -> None:
        self.events.put_nowait(error)


class ScriptedEngineLoop:
    """Hands every request to the test and records what else it is told."""

    def __init__(self) -> None:
        self.runs: asyncio.Queue[ScriptedRun] = asyncio.Queue()
        self.released_holds: list[str] = []
        # Request id and whether the KV arrived.
        self.kv_answers: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
        # Tokens that came with an answer, by request id.
        self.given_tokens: dict[str, list[int]] = {}
        self.late: list[str] = []
        self.tier_answers: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.refusal: EngineError | None = None
        self.stats = EngineStats(*range(1, 13))

    async def next_run(self) -> ScriptedRun:
        async with asyncio.timeout(20):
            return await self.runs.get()

    async def next_kv_answer(self) -> tuple[str, bool]:
        async with asyncio.timeout(20):
            return await self.kv_answers.get()

    async def generate(self, request: Request) -> AsyncGenerator[EngineEvent, None]:
        if self.refusal is not None:
            raise self.refusal
        request.submitted_at = time.perf_counter()
        run = ScriptedRun(request)
        self.runs.put_nowait(run)
        try:
            is_over = False
            while not is_over:
                event = await run.events.get()
                if isinstance(event, BaseException):
                    raise event
                is_over = isinstance(event, TokenOutput) and event.is_last
                yield event
        finally:
            run.closed.set()

    def release_hold(self, request_id: str) -> None:
        self.released_holds.append(request_id)

    def remote_kv_done(self, request_id: str, output_token_ids: Sequence[int] = ()) -> None:
        self.given_tokens[request_id] = list(output_token_ids)
        self.kv_answers.put_nowait((request_id, True))

    def remote_kv_failed(self, request_id: str, output_token_ids: Sequence[int] = ()) -> None:
        self.given_tokens[request_id] = list(output_token_ids)
        self.kv_answers.put_nowait((request_id, False))

    def tiered_kv_done(self, request_id: str, num_blocks: int) -> None:
        self.tier_answers.put_nowait((request_id, num_blocks))

    def remote_kv_late(self, request_id: str) -> None:
        self.late.append(request_id)

    def load(self) -> EngineStats:
        return self.stats
