"""The KV cache's fixed blocks: who owns them, what the free ones still contain."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.block_marks import BlockMarks
from engine.block_residency import ResidencyClock

_NUM_GENERATIONS = 1 << 32


class BlockHasher(Protocol):
    """Content keys of full blocks, each chained to the key of the block before it."""

    def root(self, cache_salt: str = "") -> bytes: ...

    def extend(self, parent: bytes, token_ids: Sequence[int]) -> bytes: ...


@dataclass(frozen=True)
class BlockEvents:
    """Keys that became available, and keys that are no longer, since the last drain."""

    stored: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    # Where each stored key's content is, and the block's generation while it is there.
    block_ids: list[int] = field(default_factory=list, compare=False)
    generations: list[int] = field(default_factory=list, compare=False)
    # Those of the stored ones that colder tiers have, because they came from there.
    from_tiers: frozenset[bytes] = frozenset()


class BlockPool:
    """Hands out blocks and counts their owners.

    A block whose tokens are all computed can be registered under its content key; other
    sequences then share it. When its last owner leaves, a registered block keeps its content
    until it is the least recently used free block and the memory is needed. Two blocks may
    come to hold the same content: the first one registered is the one that is found.

    A block's generation changes whenever it is handed out for new content, before that is
    written: who reads a block without owning it compares before and after. Once that content is
    whole, the block is marked as filled in that generation; and for who reads a sequence while it
    is computed, its last block is marked with the token that came next.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hasher: BlockHasher,
        *,
        enable_prefix_caching: bool = True,
        marks: BlockMarks | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._hasher = hasher
        self._enable_prefix_caching = enable_prefix_caching
        self._marks = marks or BlockMarks.private(num_blocks)
        self.residency = ResidencyClock(num_blocks)
        self._num_owners = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # Free blocks without content are used first, then cached ones, oldest first.
        self._free_blank = list(reversed(range(num_blocks)))
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        # True: stored, False: removed. The last change of a key is the one that counts.
        self._changes: dict[bytes, bool] = {}
        self._from_tiers: set[bytes] = set()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now, cached ones included."""
        return len(self._free_blank) + len(self._free_cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def is_shared(self, block_id: int) -> bool:
        return self._num_owners[block_id] > 1

    def grow(
        self,
        block_ids: list[int],
        num_tokens: int,
        *,
        cached: Sequence[int] = (),
        spare: int = 0,
    ) -> bool:
        """Append blocks until `num_tokens` fit: first the `cached` ones, then new ones.

        All or nothing, and `spare` blocks must be left over.
        """
        num_new = max(0, self.num_blocks_for(num_tokens) - len(block_ids) - len(cached))
        num_revived = sum(self._num_owners[block_id] == 0 for block_id in cached)
        # A sequence that needs nothing takes nothing, whatever is left over.
        if num_new + num_revived and num_new + num_revived + spare > self.num_free_blocks:
            return False
        for block_id in cached:
            self._free_cached.pop(block_id, None)
            self._num_owners[block_id] += 1
            self.residency.shared(block_id)
        block_ids += cached
        block_ids += [self._take() for _ in range(num_new)]
        return True

    def release(self, block_ids: list[int]) -> None:
        """Give up all blocks of a sequence; the list is emptied.

        Last block first, so that the end of a sequence is evicted before its beginning,
        without which it could not be found.
        """
        while block_ids:
            block_id = block_ids.pop()
            assert self._num_owners[block_id] > 0, "block released twice"
            self._num_owners[block_id] -= 1
            if self._num_owners[block_id] == 0:
                if self._keys[block_id] is None:
                    self._free_blank.append(block_id)
                else:
                    self._free_cached[block_id] = None

    def extend_keys(self, keys: list[bytes], token_ids: Sequence[int], cache_salt: str) -> None:
        """Append the keys of a sequence's full blocks that `keys` does not have yet."""
        if not self._enable_prefix_caching:
            return
        for index in range(len(keys), len(token_ids) // self.block_size):
            parent = keys[-1] if keys else self._hasher.root(cache_salt)
            start = index * self.block_size
            keys.append(self._hasher.extend(parent, token_ids[start : start + self.block_size]))

    def longest_prefix(self, keys: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest run of leading keys; they are not taken yet."""
        found: list[int] = []
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def register(self, block_id: int, key: bytes, *, is_from_tiers: bool = False) -> None:
        """Let others find a block, now that all its tokens are computed."""
        if key not in self._block_of and self._keys[block_id] is None:
            self._block_of[key] = block_id
            self._keys[block_id] = key
            self._changes[key] = True
            if is_from_tiers:
                self._from_tiers.add(key)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Let nobody find these owned blocks any more: their content is not to be trusted."""
        for block_id in block_ids:
            assert self._num_owners[block_id] > 0, "free blocks are evicted, not forgotten"
            self._unregister(block_id)

    def drain_events(self) -> BlockEvents:
        """What changed since the last call."""
        changes, self._changes = self._changes, {}
        from_tiers, self._from_tiers = frozenset(self._from_tiers), set()
        stored = [key for key, is_stored in changes.items() if is_stored]
        block_ids = [self._block_of[key] for key in stored]
        return BlockEvents(
            stored=stored,
            removed=[key for key, is_stored in changes.items() if not is_stored],
            block_ids=block_ids,
            generations=self.generations_of(block_ids),
            from_tiers=from_tiers,
        )

    def mark_filled(self, block_ids: Sequence[int]) -> None:
        """All content that these owned blocks will have in this generation is written."""
        for block_id in block_ids:
            self._marks.filled[block_id] = self._marks.generations[block_id]

    def mark_next_token(self, block_id: int, token_id: int) -> None:
        """A token was sampled after the last one in this owned block."""
        self._marks.next_tokens[block_id] = token_id + 1

    def generations_of(self, block_ids: Sequence[int]) -> list[int]:
        return [self._marks.generations[block_id] for block_id in block_ids]

    def _take(self) -> int:
        if self._free_blank:
            block_id = self._free_blank.pop()
        else:
            block_id, _ = self._free_cached.popitem(last=False)
            self._unregister(block_id)
            self.residency.evicted(block_id)
        self.residency.handed_out(block_id)
        self._num_owners[block_id] = 1
        marks = self._marks
        marks.next_tokens[block_id] = 0
        marks.generations[block_id] = (marks.generations[block_id] + 1) % _NUM_GENERATIONS
        return block_id

    def _unregister(self, block_id: int) -> None:
        key = self._keys[block_id]
        if key is not None:
            self._keys[block_id] = None
            del self._block_of[key]
            self._changes[key] = False
            self._from_tiers.discard(key)
