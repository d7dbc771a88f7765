"""The engine: requests go in, each step computes a batch, tokens come out."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from engine.batcher import Batch, Batcher, ScheduledRequest
from engine.block_marks import BlockMarks
from engine.block_pool import BlockEvents, BlockPool
from engine.block_residency import Residency
from engine.committer import Committer
from engine.layered_prefill import LayeredPrefill
from engine.model_runner import Runner
from engine.prompt_sources import PromptSources
from engine.remote_kv_waits import RemoteKvWaits
from engine.reports import EngineStats, StepReport
from engine.request import (
    DuplicateRequest,
    EngineEvent,
    InvalidParameter,
    Request,
    RequestStatus,
    RequestTooLarge,
    TooManyWaiting,
)
from engine.request_table import RequestTable
from engine.sampling import Sampler, check_token_id


class Engine:
    """Continuous batching over one model. Not thread-safe: `EngineLoop` owns it in a service.

    A sequence may grow to `max_model_len` tokens, or to what the whole cache holds if that is
    less; a request whose prompt leaves no room below that is refused, so whatever is accepted
    gets its turn.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        batcher: Batcher,
        pool: BlockPool,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        max_num_waiting: int,
        layered: LayeredPrefill | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`layered`: how prompts are computed beside decodes; None: always together with them."""
        self._runner = runner
        self._layered = layered
        self._batcher = batcher
        self._pool = pool
        self.max_model_len = min(max_model_len, pool.num_blocks * pool.block_size)
        self.block_size = pool.block_size
        self.num_blocks = pool.num_blocks
        self.block_bytes = runner.block_bytes
        # Where in the segment's file the blocks' generations are; None: there is no file.
        self.generations_offset: int | None = None
        # What others are told of the blocks there.
        self.block_marks: BlockMarks | None = None
        self.max_num_batched_tokens = batcher.max_num_batched_tokens
        self.max_num_requests = batcher.max_num_seqs + max_num_waiting
        self._clock = clock
        self._prompts = PromptSources()
        self._table = RequestTable(batcher, pool)
        self._remote_kv = RemoteKvWaits(self._table, batcher, pool, self._prompts, clock)
        self._committer = Committer(
            sampler,
            self._table,
            batcher,
            pool,
            self._prompts,
            eos_token_ids=eos_token_ids,
            max_model_len=self.max_model_len,
            clock=clock,
        )
        # What decodes took in the last step that had no prompts in the same pass.
        self._decoding_s = 0.0
        self._num_steps = 0
        # Only a call from outside can give the next step something to do.
        self.is_stalled = True
        # Called within `step`; may be replaced.
        self.on_block_events: Callable[[BlockEvents], None] = lambda events: None
        # Called within `step` when blocks were filled that others may be waiting to read.
        self.on_filled: Callable[[], None] = lambda: None
        # Called at the end of each `step` that computed or preempted something.
        self.on_step: Callable[[StepReport], None] | None = None

    def step(self) -> list[EngineEvent]:
        """Run one forward pass over whatever is due, and commit what it produced."""
        started_at = self._clock()
        batch = self._pick()
        # Evicted blocks are announced before the pass overwrites them.
        self._announce_blocks()
        events: list[EngineEvent] = [*map(self._remote_kv.ask, batch.remote_kv_wanted)]
        # First, so that the decodes' tokens go out as soon as they are there.
        events += self._carry_on(batch)
        if batch.scheduled:
            decoding_since = self._clock()
            events += self._commit(batch, self._execute(batch.scheduled))
            if all(item.num_tokens == 1 for item in batch.scheduled):
                self._decoding_s = self._clock() - decoding_since
        self._num_steps += bool(batch.scheduled or batch.computed_apart)
        self.is_stalled = batch.is_empty or not self._batcher.has_work
        if self.on_step is not None and not batch.is_empty:
            residency = self._pool.residency.drain()
            self.on_step(_report(batch, self._clock() - started_at, residency))
        return events

    @property
    def runner(self) -> Runner:
        """What computes. Only while no request has come may others use its blocks."""
        return self._runner

    def check(self, request: Request) -> None:
        """Raise an EngineError if the request could never be served; safe on any thread."""
        if not request.prompt_token_ids:
            raise InvalidParameter("prompt", "the prompt is empty")
        for token_id in request.token_ids:
            check_token_id("prompt", token_id, self._runner.vocab_size)
        request.sampling_params.validate(self._runner.vocab_size)
        if request.num_tokens >= self.max_model_len:
            raise RequestTooLarge(
                f"the request has {request.num_tokens} tokens and needs room for one more, "
                f"but a sequence may have at most {self.max_model_len}"
            )
        if len(request.output_token_ids) >= request.sampling_params.max_tokens:
            raise InvalidParameter(
                "max_tokens",
                f"all {request.sampling_params.max_tokens} tokens were produced already",
            )

    def add_request(self, request: Request) -> None:
        """Queue a request; raises an EngineError if it is refused.

        Its id must be free: neither in use nor owning blocks after its end.
        """
        self.check(request)
        if self._table.is_known(request.request_id):
            raise DuplicateRequest(f"request {request.request_id} is known already")
        num_requests = len(self._table.requests)
        if num_requests >= self.max_num_requests:
            raise TooManyWaiting(f"{num_requests} requests are running or waiting already")
        self._table.add(request, self._clock())

    def abort(self, request_id: str) -> bool:
        """Drop a request in whichever state it is; False if it is over already."""
        request = self._table.requests.get(request_id)
        if request is None:
            return False
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._table.quarantine(request)
        if self._layered is not None:
            self._layered.drop([request])
        self._table.retire(request)
        return True

    def release_hold(self, request_id: str) -> bool:
        """Give back the blocks of a finished `hold_blocks` request; False if there are none."""
        return self._table.release_hold(request_id)

    def remote_kv_done(self, request_id: str, output_token_ids: Sequence[int] = ()) -> bool:
        """Answer RemoteKvWanted: the blocks are written."""
        return self._remote_kv.done(request_id, output_token_ids)

    def tiered_kv_done(self, request_id: str, num_blocks: int) -> bool:
        """Answer RemoteKvWanted of a `tiered_kv` request: so many blocks are written."""
        return self._remote_kv.tiered_done(request_id, num_blocks)

    def remote_kv_failed(self, request_id: str, output_token_ids: Sequence[int] = ()) -> bool:
        """Answer RemoteKvWanted: the blocks will not come, and nothing writes to them."""
        return self._remote_kv.failed(request_id, output_token_ids)

    def remote_kv_late(self, request_id: str) -> None:
        """Do without an answer to RemoteKvWanted, which must still come."""
        self._remote_kv.late(request_id)

    def load(self) -> EngineStats:
        """Count what the engine is doing."""
        batcher, pool = self._batcher, self._pool
        return EngineStats(
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_leases=len(self._table.held),
            num_running=len(batcher.running),
            num_waiting=len(batcher.waiting) + len(batcher.waiting_for_remote),
            num_waiting_tokens=sum(
                max(0, request.num_prompt_tokens - request.num_computed_tokens)
                for request in (*batcher.waiting, *batcher.running)
                if request.tiered_kv or not request.awaits_remote_kv
            ),
            num_prefix_cache_queries=batcher.num_prefix_cache_queries,
            num_prefix_cache_hits=batcher.num_prefix_cache_hits,
            num_preemptions=batcher.num_preemptions,
            num_recomputed_tokens=batcher.num_recomputed_tokens,
            num_steps=self._num_steps,
            num_invalid_logits=self._committer.num_invalid_logits,
            num_waiting_for_kv=len(batcher.waiting_for_remote),
            num_external_queries=self._prompts.num_external_queries,
            num_external_hits=self._prompts.num_external_hits,
            num_computed_prompt_tokens=self._prompts.num_computed,
            num_cached_prompt_tokens=self._prompts.num_cached,
            num_external_prompt_tokens=self._prompts.num_external,
            drafts=self._batcher.draft_counts(),
        )

    def close(self) -> None:
        """Release the KV cache's memory. No transfer may be reading or writing it."""
        self._runner.close()

    def _pick(self) -> Batch:
        layered = self._layered
        if layered is None:
            return self._batcher.pick()
        batch = self._batcher.pick(layered.requests, layered.num_tokens_beside)
        layered.drop(batch.preempted)
        layered.take_from(batch)
        return batch

    def _carry_on(self, batch: Batch) -> list[EngineEvent]:
        """Compute some layers of the prompts that are computed apart."""
        if self._layered is None:
            return []
        finished = self._layered.advance(self._decoding_s if batch.scheduled else None)
        if finished is None:
            return []
        batch.num_tokens_apart = sum(item.num_tokens for item in finished.scheduled)
        return self._commit(Batch(finished.scheduled), finished.logits)

    def _execute(self, scheduled: Sequence[ScheduledRequest]) -> npt.NDArray[np.float32]:
        """Compute a batch; who waits for its KV is told before there are logits."""
        handed_over = [item for item in scheduled if item.request.hold_blocks]
        if not handed_over:
            return self._runner.execute(scheduled)

        def on_kv_written() -> None:
            for item in handed_over:
                start = item.request.num_computed_tokens
                end = start + item.num_tokens
                # The last block may have room left that nobody will use.
                end_block = self._pool.num_blocks_for(end) if item.samples else end // size
                self._pool.mark_filled(item.request.block_ids[start // size : end_block])
            self.on_filled()

        size = self.block_size
        return self._runner.execute(scheduled, on_kv_written)

    def _commit(self, batch: Batch, logits: npt.NDArray[np.float32]) -> list[EngineEvent]:
        """Record what a pass computed, and tell those who wait for its blocks."""
        events = self._committer.commit(batch, logits)
        if any(item.request.hold_blocks for item in batch.scheduled):
            self.on_filled()
        self._announce_blocks()
        return events

    def _announce_blocks(self) -> None:
        events = self._pool.drain_events()
        if events.stored or events.removed:
            self.on_block_events(events)


def _report(batch: Batch, duration_s: float, residency: Residency) -> StepReport:
    return StepReport(
        duration_s=duration_s,
        num_tokens=sum(item.num_rows for item in batch.scheduled) + batch.num_tokens_apart,
        request_ids=tuple(
            item.request.request_id for item in (*batch.scheduled, *batch.computed_apart)
        ),
        preempted_request_ids=tuple(request.request_id for request in batch.preempted),
        residency=residency,
    )
