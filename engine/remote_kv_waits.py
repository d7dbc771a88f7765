"""Requests whose KV is written from elsewhere, by another worker or out of a colder tier."""

from collections.abc import Callable, Sequence

from engine.batcher import Batcher
from engine.block_pool import BlockPool
from engine.prompt_sources import PromptSources
from engine.request import RemoteKvWanted, Request, RequestStatus
from engine.request_table import RequestTable


class RemoteKvWaits:
    """Asks for KV once blocks for it are there, and lets the request go on when that is answered.

    Whoever was asked may write to the blocks until the answer, so they stay reserved until then
    even if the request is aborted or does without them.
    """

    def __init__(
        self,
        table: RequestTable,
        batcher: Batcher,
        pool: BlockPool,
        prompts: PromptSources,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._batcher = batcher
        self._pool = pool
        self._prompts = prompts
        self._clock = clock

    def ask(self, request: Request) -> RemoteKvWanted:
        """Ask for the KV of a request that got its blocks in this step."""
        first = request.num_computed_tokens // self._pool.block_size
        end = self._pool.num_blocks_for(request.num_remote_tokens)
        keys: list[bytes] = []
        if request.tiered_kv:
            keys = self._batcher.keys_not_cached(request)
            end = first + len(keys)
        block_ids = tuple(request.block_ids[first:end])
        self._prompts.num_external_queries += request.num_uncomputed_tokens
        return RemoteKvWanted(request.request_id, first, block_ids, tuple(keys))

    def done(self, request_id: str, output_token_ids: Sequence[int]) -> bool:
        """The wanted blocks are written. False if nobody waits for them any more.

        `output_token_ids` are those that a `remote_token` request did not know yet.
        """
        request = self._end(request_id)
        if request is None:
            return False
        request.output_token_ids += output_token_ids
        request.has_remote_kv = True
        self._go_on(request, request.num_uncomputed_tokens - 1)
        return True

    def tiered_done(self, request_id: str, num_blocks: int) -> bool:
        """The first `num_blocks` of the wanted blocks are written, the others will not be.

        False if nobody waits for them any more.
        """
        request = self._end(request_id)
        if request is None:
            return False
        num_tokens = num_blocks * self._pool.block_size
        self._batcher.count_tier_hit(request, num_tokens)
        self._go_on(request, num_tokens, is_from_tiers=True)
        return True

    def failed(self, request_id: str, output_token_ids: Sequence[int]) -> bool:
        """The wanted blocks will not come, and nothing writes to them any more.

        The request computes its tokens here. False if nobody waits for it any more.
        """
        request = self._end(request_id)
        if request is None:
            return False
        request.output_token_ids += output_token_ids
        self._pool.release(request.block_ids)
        self._start_over(request)
        return True

    def late(self, request_id: str) -> None:
        """The wanted blocks are of no use any more, but may still be written to.

        The request computes its tokens here, in others. These stay reserved for the answer,
        as they do where the request was aborted before.
        """
        request = self._leave(request_id)
        if request is not None:
            self._table.quarantine(request)
            self._start_over(request)

    def _end(self, request_id: str) -> Request | None:
        """Take a request off its wait, or its blocks out of quarantine."""
        if self._table.release_quarantined(request_id):
            return None
        return self._leave(request_id)

    def _leave(self, request_id: str) -> Request | None:
        """Take a request off its wait; None if it waits no more."""
        request = self._table.requests.get(request_id)
        if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            return None
        self._batcher.remove(request)
        request.awaits_remote_kv = False
        return request

    def _go_on(self, request: Request, num_tokens: int, *, is_from_tiers: bool = False) -> None:
        """Let a request compute what follows the tokens whose KV came."""
        self._prompts.came_from_elsewhere(request, num_tokens)
        self._table.advance(request, num_tokens, is_from_tiers=is_from_tiers)
        self._batcher.start_running(request)

    def _start_over(self, request: Request) -> None:
        """Queue a request again that has no blocks any more."""
        request.num_computed_tokens = 0
        request.enter(RequestStatus.WAITING, self._clock())
        self._batcher.add(request)
