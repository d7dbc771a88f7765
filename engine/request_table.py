"""The requests in the engine, and whose the blocks are: theirs, also after their end."""

from engine.batcher import Batcher
from engine.block_pool import BlockPool
from engine.request import Request, RequestStatus


class RequestTable:
    """Knows every request from its arrival until its last block is back in the pool.

    A request gives its blocks back when it is over. Two kinds stay: those that are held, because
    another worker reads them, and those in quarantine, because one may still write to them.
    """

    def __init__(self, batcher: Batcher, pool: BlockPool) -> None:
        self._batcher = batcher
        self._pool = pool
        self._num_arrivals = 0
        # Those that are not over.
        self.requests: dict[str, Request] = {}
        # Blocks of finished requests, kept for another worker.
        self.held: dict[str, list[int]] = {}
        # Blocks that nobody waits for any more, but that may still be written to from elsewhere.
        self.quarantined: dict[str, list[int]] = {}

    def is_known(self, request_id: str) -> bool:
        """The id is in use, or owns blocks after its request's end."""
        return any(request_id in owners for owners in (self.requests, self.held, self.quarantined))

    def add(self, request: Request, now: float) -> None:
        """Take a request in and queue it."""
        request.arrive(self._num_arrivals, now)
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        self._batcher.add(request)

    def retire(self, request: Request) -> None:
        """A request is over: it leaves its queue, and gives back the blocks that it still has."""
        self._batcher.remove(request)
        self._pool.release(request.block_ids)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]

    def hold(self, request: Request) -> tuple[int, ...]:
        """Keep a request's blocks for another worker; returns them."""
        block_ids = self.held[request.request_id] = _take_blocks(request)
        return tuple(block_ids)

    def release_hold(self, request_id: str) -> bool:
        """Give back what `hold` kept; False if there is nothing."""
        return self._release_from(self.held, request_id)

    def quarantine(self, request: Request) -> None:
        """Reserve a request's blocks, which may still be written to; it has none any more."""
        self.quarantined[request.request_id] = _take_blocks(request)

    def release_quarantined(self, request_id: str) -> bool:
        """Nothing writes to the blocks any more; False if there are none in quarantine."""
        return self._release_from(self.quarantined, request_id)

    def advance(self, request: Request, num_tokens: int, *, is_from_tiers: bool = False) -> None:
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

    def _release_from(self, owners: dict[str, list[int]], request_id: str) -> bool:
        block_ids = owners.pop(request_id, None)
        if block_ids is None:
            return False
        self._pool.release(block_ids)
        return True


def _take_blocks(request: Request) -> list[int]:
    """Move a request's blocks to a new owner."""
    block_ids = request.block_ids.copy()
    request.block_ids.clear()
    return block_ids
