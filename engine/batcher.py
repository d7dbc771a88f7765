"""What runs next: one token budget over all requests, and who gives way when blocks run out."""

import bisect
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from engine.block_pool import BlockPool
from engine.request import Request, RequestStatus
from engine.sampling import NextToken
from engine.speculation import NO_DRAFTS, DraftCounts, Speculator

# Each has a row of logits as wide as the vocabulary: what a step holds at once is bounded, of a
# request and of all.
_MAX_SCORED_TOKENS = 64
_MAX_ALL_SCORED_TOKENS = 256


@dataclass(frozen=True)
class ScheduledRequest:
    """The tokens of one request that a step computes."""

    request: Request
    num_tokens: int
    # The step reaches the request's last token, so it yields the next one.
    samples: bool
    # Guesses of the tokens after the last; the step computes them as well.
    draft_token_ids: Sequence[int] = ()

    @property
    def is_continued(self) -> bool:
        """Earlier steps have computed some of its prompt."""
        return self.request.num_computed_tokens > (self.request.num_cached_tokens or 0)

    @property
    def mean_context(self) -> float:
        """Tokens before each of those that the step computes, on average."""
        return self.request.num_computed_tokens + (self.num_tokens - 1) / 2

    @property
    def num_rows(self) -> int:
        return self.num_tokens + len(self.draft_token_ids)

    @property
    def num_sampled(self) -> int:
        """Tokens that are drawn: the next one, and one after each guess."""
        return self.samples + len(self.draft_token_ids)

    @property
    def num_logits(self) -> int:
        """Rows of logits that the step needs, those of the last tokens."""
        return self.num_tokens if self.request.scores_prompt else self.num_sampled

    def token_ids(self) -> list[int]:
        """What the step computes."""
        start = self.request.num_computed_tokens
        known = self.request.slice_token_ids(start, start + self.num_tokens)
        return known + list(self.draft_token_ids)


@dataclass
class Batch:
    """What one step does."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    # Got their blocks in this step; these wait to be filled from elsewhere.
    remote_kv_wanted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    # Prompts may be computed in part.
    has_chunks: bool = True
    # Computed by passes that other steps begin and end, and how much of it this step ended.
    computed_apart: list[ScheduledRequest] = field(default_factory=list)
    num_tokens_apart: int = 0

    @property
    def sampling(self) -> list[NextToken]:
        """The tokens to draw, in the order of their rows of logits."""
        return [
            NextToken.of(item.request, num_ahead)
            for item in self.scheduled
            for num_ahead in range(item.num_sampled)
        ]

    @property
    def num_scored_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled if item.request.scores_prompt)

    @property
    def is_empty(self) -> bool:
        return not (
            self.scheduled or self.computed_apart or self.remote_kv_wanted or self.preempted
        )


class Batcher:
    """Owns the queues. There is no prefill phase and no decode phase: every request has computed
    tokens that catch up with its tokens, and a step spends `max_num_batched_tokens` on that.

    Decodes come first, so no prompt holds up a running stream for longer than one step; then
    prompts, in order of arrival. A long one leaves up to half of its step to a shorter one behind
    it, which would have to wait for all of it. A request is let in when blocks for all its tokens
    are there.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int = 0,
        speculator: Speculator | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {max_num_batched_tokens} is below "
                f"max_num_seqs {max_num_seqs}: not every running request could decode in a step"
            )
        self._pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._chunk_limit = long_prefill_token_threshold or max_num_batched_tokens
        self.speculator = speculator
        self._clock = clock
        # In order of arrival. Whatever was let in before is older than whatever was not, so a
        # preempted request resumes before new ones start.
        self.waiting: list[Request] = []
        # Blocks reserved, KV on its way from another worker.
        self.waiting_for_remote: list[Request] = []
        self.running: list[Request] = []
        self.num_prefix_cache_queries = 0
        self.num_prefix_cache_hits = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0

    @property
    def has_work(self) -> bool:
        """Some request computes, or waits for its turn to compute."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request, new or given back."""
        bisect.insort(self.waiting, request, key=lambda queued: queued.arrival)

    def remove(self, request: Request) -> None:
        """Take a request off its queue; its blocks stay its own."""
        match request.status:
            case RequestStatus.RUNNING:
                self.running.remove(request)
            case RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.waiting_for_remote.remove(request)
            case _:
                self.waiting.remove(request)

    def pick(self, under_way: Collection[Request] = (), num_tokens_beside: int = 0) -> Batch:
        """Choose what the next step computes, and take the blocks for it.

        While requests are `under_way`, which is for others to compute, prompts are computed only
        if they end with this step and have together no more than `num_tokens_beside` tokens.
        """
        batch = Batch(preempted=self._make_room())
        budget = self.max_num_batched_tokens
        decoding = [request for request in self.running if request.num_uncomputed_tokens == 1]
        budget -= len(decoding)
        for request, draft in zip(decoding, self._drafts(decoding, budget), strict=True):
            budget -= len(draft)
            batch.scheduled.append(ScheduledRequest(request, 1, True, draft))
        if under_way:
            batch.has_chunks = False
            budget = min(budget, num_tokens_beside)
        for request in self.running:
            if request.num_uncomputed_tokens > 1 and request not in under_way:
                budget -= self._schedule(request, budget, batch)
        if not batch.preempted:
            self._admit(budget, batch)
        return batch

    def observe_draft(self, item: ScheduledRequest, num_accepted: int) -> None:
        """Learn how many of an item's guesses were right."""
        assert self.speculator is not None, "nobody else drafts"
        self.speculator.observe(item.request, len(item.draft_token_ids), num_accepted)

    def draft_counts(self) -> DraftCounts:
        """What was guessed so far, and what of it was right."""
        return self.speculator.counts() if self.speculator is not None else NO_DRAFTS

    def keys_not_cached(self, request: Request) -> list[bytes]:
        """Keys of the full blocks that a request which was just let in would have to compute."""
        block_size = self._pool.block_size
        first = request.num_computed_tokens // block_size
        return request.block_keys[first : (request.num_tokens - 1) // block_size]

    def _is_in_tiers(self, request: Request) -> bool:
        """Whether colder tiers may have more of a request than the prefix cache has."""
        num_tiered_tokens = request.num_tiered_tokens
        if num_tiered_tokens is not None and num_tiered_tokens <= request.num_computed_tokens:
            return False
        return bool(self.keys_not_cached(request))

    def count_tier_hit(self, request: Request, num_tokens: int) -> None:
        """Colder tiers had KV of the prompt that the prefix cache did not have."""
        num_cached_tokens = min(
            (request.num_cached_tokens or 0) + num_tokens, request.num_prompt_tokens - 1
        )
        self.num_prefix_cache_hits += num_cached_tokens - (request.num_cached_tokens or 0)
        request.num_cached_tokens = num_cached_tokens

    def start_running(self, request: Request) -> None:
        """Let a request compute from the next step on: its blocks and its seat are there."""
        self.running.append(request)
        request.enter(RequestStatus.RUNNING, self._clock())

    def _make_room(self) -> list[Request]:
        """Get each running request the block its next token needs, at others' cost if need be."""
        preempted: list[Request] = []
        for request in list(self.running):
            while request.status is RequestStatus.RUNNING and not self._pool.grow(
                request.block_ids, request.num_tokens
            ):
                victim = self._choose_victim()
                self._preempt(victim)
                preempted.append(victim)
        return preempted

    def _choose_victim(self) -> Request:
        """The running request that loses least: whose blocks, once gone, cost the fewest tokens to
        compute again. Blocks that others share stay, so they cost nothing, and free nothing.
        """

        def loss(request: Request) -> tuple[bool, int, int]:
            num_shared = sum(map(self._pool.is_shared, request.block_ids))
            frees_nothing = num_shared == len(request.block_ids)
            num_lost_tokens = request.num_computed_tokens - num_shared * self._pool.block_size
            return frees_nothing, num_lost_tokens, -request.arrival

        return min(self.running, key=loss)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._pool.release(request.block_ids)
        request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.enter(RequestStatus.PREEMPTED, self._clock())
        self.add(request)
        self.num_preemptions += 1

    def _drafts(self, decoding: Sequence[Request], budget: int) -> list[list[int]]:
        """Guess what follows, as far as that takes no block that another may need soon."""
        if self.speculator is None or not decoding:
            return [[]] * len(decoding)
        drafts = self.speculator.propose(decoding, budget)
        for request, draft in zip(decoding, drafts, strict=True):
            num_tokens, spare = request.num_tokens + len(draft), len(self.running)
            if not self._pool.grow(request.block_ids, num_tokens, spare=spare):
                del draft[len(request.block_ids) * self._pool.block_size - request.num_tokens :]
        return drafts

    def _schedule(self, request: Request, budget: int, batch: Batch) -> int:
        num_tokens = min(request.num_uncomputed_tokens, budget)
        if request.scores_prompt:
            num_left = _MAX_ALL_SCORED_TOKENS - batch.num_scored_tokens
            num_tokens = min(num_tokens, num_left, _MAX_SCORED_TOKENS)
        if len(self.running) + len(self.waiting) > 1:
            num_tokens = min(num_tokens, self._chunk_limit)
        if batch.has_chunks and num_tokens > budget // 2:
            num_tokens = min(
                num_tokens, max(budget - self._shortest_behind(request), -(-budget // 2))
            )
        if num_tokens < request.num_uncomputed_tokens and not batch.has_chunks:
            return 0
        if num_tokens:
            samples = num_tokens == request.num_uncomputed_tokens
            batch.scheduled.append(ScheduledRequest(request, num_tokens, samples))
        return num_tokens

    def _shortest_behind(self, request: Request) -> int:
        """What is left of a prompt that has less to compute, and comes after this one; or 0.

        Of those that wait, the first one's, if there is room for it.
        """
        behind = self.running[self.running.index(request) + 1 :]
        if self._num_seats_taken < self.max_num_seqs and self.waiting:
            # Without what it may find in the cache: that is looked up when it is let in.
            num_blocks = self._pool.num_blocks_for(self.waiting[0].num_tokens)
            if num_blocks + self._num_spare_blocks <= self._pool.num_free_blocks:
                behind.append(self.waiting[0])
        return min(
            (
                other.num_uncomputed_tokens
                for other in behind
                if 1 < other.num_uncomputed_tokens < request.num_uncomputed_tokens
                and not other.awaits_remote_kv
            ),
            default=0,
        )

    def _admit(self, budget: int, batch: Batch) -> None:
        """Let in waiting requests, oldest first; one that does not fit yet is not overtaken."""
        while self.waiting and self._num_seats_taken < self.max_num_seqs:
            request = self.waiting[0]
            if not (budget or request.awaits_remote_kv) or not self._take_blocks(request):
                return
            self.waiting.pop(0)
            if request.awaits_remote_kv and request.tiered_kv:
                # What the prefix cache has needs no colder tier.
                request.awaits_remote_kv = self._is_in_tiers(request)
            if request.awaits_remote_kv:
                self.waiting_for_remote.append(request)
                request.enter(RequestStatus.WAITING_FOR_REMOTE_KVS, self._clock())
                batch.remote_kv_wanted.append(request)
            else:
                self.start_running(request)
                budget -= self._schedule(request, budget, batch)

    @property
    def _num_seats_taken(self) -> int:
        return len(self.running) + len(self.waiting_for_remote)

    @property
    def _num_spare_blocks(self) -> int:
        """One for each request that grows, or a newcomer would soon be thrown out again."""
        return sum(not other.hold_blocks for other in (*self.running, *self.waiting_for_remote))

    def _take_blocks(self, request: Request) -> bool:
        """Give a request blocks for all its tokens, those in the prefix cache included."""
        self._pool.extend_keys(request.block_keys, request.token_ids, request.cache_salt)
        # The last token is always computed: its logits are what the request is here for.
        num_usable_blocks = (request.num_tokens - 1) // self._pool.block_size
        if request.scores_prompt:
            # So are those before it: a block in the cache has no logits.
            num_usable_blocks = 0
        cached = self._pool.longest_prefix(request.block_keys[:num_usable_blocks])
        if not self._pool.grow(
            request.block_ids, request.num_tokens, cached=cached, spare=self._num_spare_blocks
        ):
            return False
        request.num_computed_tokens = len(cached) * self._pool.block_size
        self._count_cache_use(request)
        return True

    def _count_cache_use(self, request: Request) -> None:
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(
                request.num_computed_tokens, request.num_prompt_tokens - 1
            )
            self.num_prefix_cache_queries += request.num_prompt_tokens
            self.num_prefix_cache_hits += request.num_cached_tokens
        self.num_recomputed_tokens += max(0, request.num_lost_tokens - request.num_computed_tokens)
        request.num_lost_tokens = 0
