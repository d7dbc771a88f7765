"""What a forward pass computed becomes tokens, progress and ends of requests."""

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from engine.batcher import Batch, Batcher, ScheduledRequest
from engine.block_pool import BlockPool
from engine.prompt_scores import score_prompts
from engine.prompt_sources import PromptSources
from engine.request import (
    EngineEvent,
    FinishReason,
    InvalidLogits,
    PrefillProgress,
    Request,
    RequestFailed,
    TokenOutput,
)
from engine.request_table import RequestTable
from engine.sampling import SampledToken, Sampler
from engine.speculation import count_accepted


class Committer:
    """Draws a batch's tokens from its logits, and records them with the requests."""

    def __init__(
        self,
        sampler: Sampler,
        table: RequestTable,
        batcher: Batcher,
        pool: BlockPool,
        prompts: PromptSources,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        self._sampler = sampler
        self._table = table
        self._batcher = batcher
        self._pool = pool
        self._prompts = prompts
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._clock = clock
        self.num_invalid_logits = 0

    def commit(self, batch: Batch, logits: npt.NDArray[np.float32]) -> list[EngineEvent]:
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
            self._table.advance(item.request, item.num_tokens)
            if usable:
                events += self._commit_tokens(item, usable, now)
            else:
                events.append(self._progress(item.request))
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
                self._table.advance(request, 1)
            output = self._commit_token(request, token, now)
            events.append(output)
            if output.is_last:
                break
        return events

    def _commit_token(self, request: Request, token: SampledToken, now: float) -> TokenOutput:
        prompt_logprobs = tuple(request.prompt_logprobs)
        request.prompt_logprobs.clear()
        request.append(token.token_id, now)
        is_first = request.num_sampled_tokens == 1
        if is_first:
            self._prompts.count(request)
        reason = request.finish_reason(self._eos_token_ids, self._max_model_len)
        if reason is None and not request.hold_blocks:
            return TokenOutput(
                request.request_id,
                token.token_id,
                token.logprobs,
                timings_so_far=request.timings(now) if is_first else None,
                prompt_logprobs=prompt_logprobs,
                num_cached_tokens=(request.num_cached_tokens or 0) if is_first else 0,
            )
        held_block_ids = self._hand_over(request, token) if reason is None else ()
        self._table.retire(request)
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
            held_block_generations=tuple(self._pool.generations_of(held_block_ids)),
            num_held_tokens=request.num_computed_tokens if held_block_ids else 0,
            sampled_at=now,
        )

    def _hand_over(self, request: Request, token: SampledToken) -> tuple[int, ...]:
        """Keep the blocks of a request that another worker goes on with, from this token."""
        block_ids = self._table.hold(request)
        # The last one may have room left that nobody will use.
        self._pool.mark_filled(block_ids[-1:])
        self._pool.mark_next_token(block_ids[-1], token.token_id)
        return block_ids

    def _progress(self, request: Request) -> PrefillProgress:
        num_computed_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        block_ids = tuple(request.block_ids) if request.hold_blocks else ()
        generations = tuple(self._pool.generations_of(block_ids))
        return PrefillProgress(request.request_id, num_computed_tokens, block_ids, generations)

    def _fail(self, request: Request) -> RequestFailed:
        # A row gone wrong may come from what the cache holds: nobody shall find it again.
        self._pool.forget(request.block_ids)
        self.num_invalid_logits += 1
        self._table.retire(request)
        message = f"no usable distribution at position {request.num_tokens}"
        return RequestFailed(request.request_id, InvalidLogits(message))


def _usable(drawn: Sequence[SampledToken | None]) -> list[SampledToken]:
    """The tokens before the first row that is no usable distribution."""
    usable: list[SampledToken] = []
    for token in drawn:
        if token is None:
            break
        usable.append(token)
    return usable
