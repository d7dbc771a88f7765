"""The table of blocks in memory agrees with plain sets, whatever happens to it."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.block_index import TIERS, PrefixHit
from scheduler_svc.block_table import BlockTable

SHELVES = [f"{worker}@1#{tier}" for worker in ("a", "b", "c") for tier in TIERS]


def key(number: int) -> bytes:
    return (number * 0x9E3779B97F4A7C15 % 2**128).to_bytes(16)


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def expected(held: dict[str, set[int]], chain: Sequence[int]) -> dict[str, PrefixHit]:
    """Counted by hand, holder by holder."""
    found = {}
    for worker in ("a", "b", "c"):
        counts = [0, 0, 0]
        for number in chain:
            tiers = [n for n, tier in enumerate(TIERS) if number in held[f"{worker}@1#{tier}"]]
            if not tiers:
                break
            counts[tiers[0]] += 1
        if any(counts):
            found[f"{worker}@1"] = PrefixHit(*counts)
    return found


numbers = st.lists(st.integers(0, 9), max_size=6)


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "drop", "sweep"]), st.sampled_from(SHELVES), numbers
        ),
        max_size=40,
    ),
    numbers,
)
def test_table_agrees_with_plain_sets(
    changes: list[tuple[str, str, list[int]]], chain: list[int]
) -> None:
    table = BlockTable()
    held: dict[str, set[int]] = {shelf: set() for shelf in SHELVES}
    for change, shelf, changed in changes:
        if change == "add":
            table.add(shelf, keys(*changed))
            held[shelf] |= set(changed)
        elif change == "remove":
            table.remove(shelf, keys(*changed))
            held[shelf] -= set(changed)
        elif change == "drop":
            table.drop(shelf)
            held[shelf].clear()
        else:
            while table.sweep():
                pass

        assert table.num_blocks == len(set().union(*held.values()))
        assert table.longest_prefix(keys(*chain)) == expected(held, chain)

    for shelf in SHELVES:
        table.drop(shelf)
    while table.sweep():
        pass
    assert not any(table._shards)
    assert not table._in_use
    assert not table._by_names


def test_table_is_bounded() -> None:
    table = BlockTable(max_blocks=3)

    table.add("a@1#device", keys(1, 2, 3, 4))
    table.add("b@1#device", keys(1, 4))

    assert table.num_blocks == 3
    assert table.longest_prefix(keys(1, 2, 3, 4)) == {"a@1": PrefixHit(3), "b@1": PrefixHit(1)}
