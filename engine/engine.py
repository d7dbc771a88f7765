"""The engine: requests go in, each step computes a batch, tokens come out."""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine.batcher import Batch, Batcher, ScheduledRequest
from engine.block_marks import BlockMarks
from engine.block_pool import BlockEvents, BlockPool
from engine.block_residency import Residency
from engine.layered_prefill import LayeredPrefill
from engine.model_runner import Runner
from engine.prompt_scores import score_prompts
from engine.prompt_sources import PromptSources
from engine.reports import EngineStats, StepReport
from engine.request import (
    DuplicateRequest,
    EngineEvent,
    FinishReason,
    InvalidLogits,
    InvalidParameter,
    PrefillProgress,
    RemoteKvWanted,
    Request,
    RequestFailed,
    RequestStatus,
    RequestTooLarge,
    TokenOutput,
    TooManyWaiting,
)
from engine.sampling import SampledToken, Sampler, check_token_id
from engine.speculation import count_accepted

T = TypeVar("T")


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
        self._sampler = sampler
        self._batcher = batcher
        self._pool = pool
        self._eos_token_ids = eos_token_ids
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
        self._requests: dict[str, Request] = {}
        # Blocks of finished requests, kept for another worker until `release_hold`.
        self._held: dict[str, list[int]] = {}
        # Blocks of aborted requests that a remote pull may still be writing to.
        self._quarantined: dict[str, list[int]] = {}
        # What decodes took in the last step that had no prompts in the same pass.
        self._decoding_s = 0.0
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_invalid_logits = 0
        self._prompts = PromptSources()
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
        events = self._ask_for_remote_kv(batch)
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
        if any(
            request.request_id in owners
            for owners in (self._requests, self._held, self._quarantined)
        ):
            raise DuplicateRequest(f"request {request.request_id} is known already")
        if len(self._requests) >= self.max_num_requests:
            raise TooManyWaiting(f"{len(self._requests)} requests are running or waiting already")
        request.arrive(self._num_arrivals, self._clock())
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._batcher.add(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request in whichever state it is; False if it is over already."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._quarantined[request_id] = _take(request.block_ids)
        if self._layered is not None:
            self._layered.drop([request])
        self._retire(request)
        return True

    def release_hold(self, request_id: str) -> bool:
        """Give back the blocks of a finished `hold_blocks` request; False if there are none."""
        return self._release_from(self._held, request_id)

    def remote_kv_done(self, request_id: str, output_token_ids: Sequence[int] = ()) -> bool:
        """The wanted blocks are written. False if nobody waits for them any more.

        `output_token_ids` are those that a `remote_token` request did not know yet.
        """
        request = self._end_remote_wait(request_id)
        if request is None:
            return False
        request.output_token_ids += output_token_ids
        request.has_remote_kv = True
        num_tokens = request.num_uncomputed_tokens - 1
        self._prompts.came_from_elsewhere(request, num_tokens)
        self._advance(request, num_tokens)
        self._batcher.start_running(request)
        return True

    def tiered_kv_done(self, request_id: str, num_blocks: int) -> bool:
        """The first `num_blocks` of the wanted blocks are written, the others will not be.

        False if nobody waits for them any more.
        """
        request = self._end_remote_wait(request_id)
        if request is None:
            return False
        num_tokens = num_blocks * self._pool.block_size
        self._batcher.count_tier_hit(request, num_tokens)
        self._prompts.came_from_elsewhere(request, num_tokens)
        self._advance(request, num_tokens, is_from_tiers=True)
        self._batcher.start_running(request)
        return True

    def remote_kv_failed(self, request_id: str, output_token_ids: Sequence[int] = ()) -> bool:
        """The wanted blocks will not come, and nothing writes to them any more.

        The request computes its tokens here. False if nobody waits for it any more.
        """
        request = self._end_remote_wait(request_id)
        if request is None:
            return False
        request.output_token_ids += output_token_ids
        self._pool.release(request.block_ids)
        self._start_over(request)
        return True

    def remote_kv_late(self, request_id: str) -> None:
        """The wanted blocks are of no use any more, but may still be written to.

        The request computes its tokens here, in others. These stay reserved for the answer.
        """
        request = self._end_remote_wait(request_id)
        if request is not None:
            self._quarantined[request_id] = _take(request.block_ids)
            self._start_over(request)

    def load(self) -> EngineStats:
        """Count what the engine is doing."""
        batcher, pool = self._batcher, self._pool
        return EngineStats(
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_leases=len(self._held),
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
            num_invalid_logits=self._num_invalid_logits,
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

    def _announce_blocks(self) -> None:
        events = self._pool.drain_events()
        if events.stored or events.removed:
            self.on_block_events(events)

    def _ask_for_remote_kv(self, batch: Batch) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        for request in batch.remote_kv_wanted:
            first = request.num_computed_tokens // self._pool.block_size
            end = self._pool.num_blocks_for(request.num_remote_tokens)
            keys: list[bytes] = []
            if request.tiered_kv:
                keys = self._batcher.keys_not_cached(request)
                end = first + len(keys)
            block_ids = tuple(request.block_ids[first:end])
            events.append(RemoteKvWanted(request.request_id, first, block_ids, tuple(keys)))
            self._prompts.num_external_queries += request.num_uncomputed_tokens
        return events

    def _commit(self, batch: Batch, logits: npt.NDArray[np.float32]) -> list[EngineEvent]:
        """Record what a pass computed; a finished request gives its blocks back."""
        tokens = self._sampler.sample(score_prompts(batch, logits), batch.sampling)
        now = self._clock()
        sampled = iter(tokens)
        events: list[EngineEvent] = []
        for item in batch.scheduled:
            drawn = list(islice(sampled, item.num_sampled))
            usable = _usable(drawn)
            if drawn and not usable:
                events.append(self._fail(item.request))
                continue
            self._advance(item.request, item.num_tokens)
            if usable:
                events += self._commit_tokens(item, usable, now)
            else:
                events.append(self._progress(item.request))
        if any(item.request.hold_blocks for item in batch.scheduled):
            self.on_filled()
        self._announce_blocks()
        return events

    def _commit_tokens(
        self, item: ScheduledRequest, drawn: Sequence[SampledToken], now: float
    ) -> list[EngineEvent]:
        """Record the token that was drawn, and those after guesses that proved right."""
        request, draft = item.request, item.draft_token_ids
        token_ids = [token.token_id for token in drawn]
        # The KV of the last token that comes of a step is not computed yet.
        num_accepted = min(count_accepted(draft, token_ids), len(drawn) - 1)
        if draft:
            self._batcher.observe_draft(item, num_accepted)
        events: list[EngineEvent] = []
        for index, token in enumerate(drawn[: num_accepted + 1]):
            if index:
                self._advance(request, 1)
            output = self._commit_token(request, token, now)
            events.append(output)
            if output.is_last:
                break
        return events

    def _advance(self, request: Request, num_tokens: int, *, is_from_tiers: bool = False) -> None:
        """Count tokens as computed, and let others find the blocks that are now full."""
        block_size = self._pool.block_size
        num_full_before = request.num_computed_tokens // block_size
        request.num_computed_tokens += num_tokens
        num_full = request.num_computed_tokens // block_size
        if num_full > len(request.block_keys):
            self._pool.extend_keys(request.block_keys, request.token_ids, request.cache_salt)
        filled = slice(num_full_before, num_full)
        self._pool.mark_filled(request.block_ids[filled])
        # No keys: prefix caching is off.
        for block_id, key in zip(
            request.block_ids[filled], request.block_keys[filled], strict=False
        ):
            self._pool.register(block_id, key, is_from_tiers=is_from_tiers)

    def _commit_token(self, request: Request, token: SampledToken, now: float) -> TokenOutput:
        prompt_logprobs = tuple(_take(request.prompt_logprobs))
        request.append(token.token_id, now)
        if request.num_sampled_tokens == 1:
            self._prompts.count(request)
        reason = request.finish_reason(self._eos_token_ids, self.max_model_len)
        if reason is None and not request.hold_blocks:
            is_first = request.num_sampled_tokens == 1
            return TokenOutput(
                request.request_id,
                token.token_id,
                token.logprobs,
                timings_so_far=request.timings(now) if is_first else None,
                prompt_logprobs=prompt_logprobs,
                num_cached_tokens=(request.num_cached_tokens or 0) if is_first else 0,
            )
        held_block_ids: tuple[int, ...] = ()
        if reason is None:
            self._held[request.request_id] = _take(request.block_ids)
            held_block_ids = tuple(self._held[request.request_id])
            # It may have room left that nobody will use.
            self._pool.mark_filled(held_block_ids[-1:])
            self._pool.mark_next_token(held_block_ids[-1], token.token_id)
        generations = tuple(self._pool.generations_of(held_block_ids))
        self._retire(request)
        return TokenOutput(
            request.request_id,
            token.token_id,
            token.logprobs,
            finish_reason=reason,
            matched_stop_token_id=token.token_id if reason is FinishReason.STOP else None,
            timings=request.timings(now),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_preemptions=request.num_preemptions,
            held_block_ids=held_block_ids,
            held_block_generations=generations,
            num_held_tokens=request.num_computed_tokens if held_block_ids else 0,
            sampled_at=now,
        )

    def _progress(self, request: Request) -> PrefillProgress:
        num_computed_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        block_ids = tuple(request.block_ids) if request.hold_blocks else ()
        generations = tuple(self._pool.generations_of(block_ids))
        return PrefillProgress(request.request_id, num_computed_tokens, block_ids, generations)

    def _fail(self, request: Request) -> RequestFailed:
        # A row gone wrong may come from what the cache holds: nobody shall find it again.
        self._pool.forget(request.block_ids)
        self._num_invalid_logits += 1
        self._retire(request)
        message = f"no usable distribution at position {request.num_tokens}"
        return RequestFailed(request.request_id, InvalidLogits(message))

    def _retire(self, request: Request) -> None:
        self._batcher.remove(request)
        self._pool.release(request.block_ids)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]

    def _end_remote_wait(self, request_id: str) -> Request | None:
        """Take a request off its wait for remote KV, or its blocks out of quarantine."""
        if self._release_from(self._quarantined, request_id):
            return None
        request = self._requests.get(request_id)
        if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            return None
        self._batcher.remove(request)
        request.awaits_remote_kv = False
        return request

    def _start_over(self, request: Request) -> None:
        """Queue a request again that has no blocks any more."""
        request.num_computed_tokens = 0
        request.enter(RequestStatus.WAITING, self._clock())
        self._batcher.add(request)

    def _release_from(self, owners: dict[str, list[int]], request_id: str) -> bool:
        block_ids = owners.pop(request_id, None)
        if block_ids is None:
            return False
        self._pool.release(block_ids)
        return True


def _usable(drawn: Sequence[SampledToken | None]) -> list[SampledToken]:
    """The tokens before the first row that is no usable distribution."""
    usable: list[SampledToken] = []
    for token in drawn:
        if token is None:
            break
        usable.append(token)
    return usable


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


def _take(items: list[T]) -> list[T]:
    """Move blocks, or what else a list holds, to a new owner."""
    taken = items.copy()
    items.clear()
    return taken
