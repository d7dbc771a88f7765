"""Who holds which block, in memory: made for lookups of long chains among many workers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from mesh.block_index import TIERS, PrefixHit, split_shelf

_NUM_SHARDS = 256
_RANKS: dict[str, int] = {tier: rank for rank, tier in enumerate(TIERS)}


class BlockTable:
    """Blocks by key, each with the shelves (`worker_id@incarnation#tier`) that hold it.

    Blocks with equal shelves share one set of them: a block costs one small object, a lookup
    compares references, and to forget a worker is to change the sets instead of the blocks.
    Shards keep the pauses short in which a dict grows or is swept.
    """

    def __init__(self, max_blocks: int = 16_000_000) -> None:
        self._max_blocks = max_blocks
        self._shards: list[dict[bytes, _Shelves]] = [{} for _ in range(_NUM_SHARDS)]
        # Every set that a block refers to, and the one that new blocks with equal shelves get.
        self._in_use: set[_Shelves] = set()
        self._by_names: dict[frozenset[str], _Shelves] = {}
        self._num_blocks = 0
        # Blocks that nobody holds any more, and the shard that is swept next.
        self._num_orphans = 0
        self._next_shard = 0

    @property
    def num_blocks(self) -> int:
        return self._num_blocks - self._num_orphans

    def add(self, shelf: str, keys: Iterable[bytes]) -> None:
        """What does not fit any more is left out: a hit less, and no memory more."""
        self._change(keys, lambda names: names | {shelf}, may_add=True)

    def remove(self, shelf: str, keys: Iterable[bytes]) -> None:
        self._change(keys, lambda names: names - {shelf}, may_add=False)

    def drop(self, shelf: str) -> None:
        """Forget all that is on a shelf. Blocks that nobody else holds are swept later."""
        for shelves in [one for one in self._in_use if shelf in one.names]:
            self._unname(shelves)
            shelves.become(shelves.names - {shelf})
            if shelves.names:
                # Of two equal sets either may be found by name.
                self._by_names.setdefault(shelves.names, shelves)
            else:
                self._num_orphans += shelves.num_blocks

    def sweep(self) -> bool:
        """Clear orphans out of one shard; False when there is none left."""
        if self._num_orphans:
            shard = self._shards[self._next_shard]
            for key in [key for key, shelves in shard.items() if not shelves.names]:
                self._count(shard.pop(key), -1)
                self._num_blocks -= 1
                self._num_orphans -= 1
            self._next_shard = (self._next_shard + 1) % _NUM_SHARDS
        return self._num_orphans > 0

    def longest_prefix(self, keys: Sequence[bytes]) -> dict[str, PrefixHit]:
        """What each holder has of the leading blocks; those without the first are not named."""
        counts: dict[str, list[int]] = {}
        leading: set[str] | None = None
        for shelves, run in groupby(self._walk(keys)):
            leading = shelves.holders if leading is None else leading & shelves.holders
            if not leading:
                break
            num_blocks = sum(1 for _ in run)
            for holder in leading:
                by_tier = counts.setdefault(holder, [0, 0, 0])
                by_tier[shelves.warmest[holder]] += num_blocks
        return {holder: PrefixHit(*by_tier) for holder, by_tier in counts.items()}

    def _walk(self, keys: Sequence[bytes]) -> Iterator["_Shelves"]:
        shards = self._shards
        for key in keys:
            shelves = shards[key[0]].get(key)
            if shelves is None or not shelves.names:
                return
            yield shelves

    def _change(
        self,
        keys: Iterable[bytes],
        change: Callable[[frozenset[str]], frozenset[str]],
        *,
        may_add: bool,
    ) -> None:
        # Most keys of a batch have the same shelves.
        known: dict[int, tuple[_Shelves, _Shelves]] = {}
        for key in keys:
            shard = self._shards[key[0]]
            before = shard.get(key)
            if before is None:
                if not may_add or self._num_blocks >= self._max_blocks:
                    continue
                before = _NOBODY
                self._num_blocks += 1
            elif not before.names:
                self._num_orphans -= 1
            pair = known.get(id(before))
            if pair is None:
                pair = known[id(before)] = (before, self._named(change(before.names)))
            after = pair[1]
            if after.names:
                shard[key] = after
                self._count(after, 1)
            else:
                shard.pop(key, None)
                self._num_blocks -= 1
            self._count(before, -1)

    def _named(self, names: frozenset[str]) -> "_Shelves":
        return self._by_names.get(names) or _Shelves(names)

    def _count(self, shelves: "_Shelves", change: int) -> None:
        if shelves is _NOBODY:
            return
        shelves.num_blocks += change
        if shelves.num_blocks == 0:
            self._in_use.discard(shelves)
            self._unname(shelves)
        elif change > 0:
            self._in_use.add(shelves)
            self._by_names.setdefault(shelves.names, shelves)

    def _unname(self, shelves: "_Shelves") -> None:
        if self._by_names.get(shelves.names) is shelves:
            del self._by_names[shelves.names]


class _Shelves:
    """The shelves that some blocks have in common."""

    __slots__ = ("holders", "names", "num_blocks", "warmest")

    def __init__(self, names: frozenset[str]) -> None:
        self.num_blocks = 0
        self.become(names)

    def become(self, names: frozenset[str]) -> None:
        self.names = names
        # The warmest tier of each holder.
        self.warmest: dict[str, int] = {}
        for name in names:
            holder, tier = split_shelf(name)
            rank = _RANKS.get(tier)
            if rank is not None:
                self.warmest[holder] = min(rank, self.warmest.get(holder, rank))
        self.holders = set(self.warmest)


_NOBODY = _Shelves(frozenset())
