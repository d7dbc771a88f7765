import hashlib
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.block_keys import KEY_BYTES, BlockKeys, layout_difference, layout_fingerprint

FIELDS: dict[str, str | int] = {"model": "smollm2", "layers": 30, "block_size": 16}
TOKEN_IDS = list(range(40))

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)
field_values = st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=12))


def keys() -> BlockKeys:
    return BlockKeys(layout_fingerprint(FIELDS))


def test_keys_equal_the_golden_vectors() -> None:
    """A change here makes every cached block of a running mesh unknown: bump the version."""
    assert layout_fingerprint(FIELDS) == "7be932391134013d58f2fec876a6e338"
    assert keys().root().hex() == "7402bee61128b05d6a4a33e65d4a6436"
    assert keys().root("tenant").hex() == "f386fdb25c3114643346a072006c20bf"
    assert [key.hex() for key in keys().chain(TOKEN_IDS, 16)] == [
        "9a7a59bec124c0ba307399ecc992e130",
        "ab193462242fa7ffc78c010c8801e889",
    ]


def test_keys_equal_the_encoding_as_documented() -> None:
    def text(value: bytes) -> bytes:
        return struct.pack("<I", len(value)) + value

    def digest(encoded: bytes) -> bytes:
        return hashlib.sha256(encoded).digest()[:16]

    fingerprint = layout_fingerprint(FIELDS)
    root = digest(
        text(b"pdmesh.kv.1.root")
        + text(fingerprint.encode())
        + struct.pack("<I", 1)
        + text(b"cache_salt")
        + b"s"
        + text(b"tenant")
    )
    first = digest(
        text(b"pdmesh.kv.1.block") + root + struct.pack("<I", 16) + struct.pack("<16I", *range(16))
    )

    assert keys().root("tenant") == root
    assert keys().chain(TOKEN_IDS, 16, "tenant")[0] == first


# KV-04
@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_keys_do_not_depend_on_the_process(hash_seed: str) -> None:
    program = (
        "from mesh.block_keys import BlockKeys, layout_fingerprint\n"
        f"keys = BlockKeys(layout_fingerprint({FIELDS!r}))\n"
        "print(*(key.hex() for key in keys.chain(list(range(40)), 16, 'tenant')))"
    )

    printed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert printed.split() == [key.hex() for key in keys().chain(TOKEN_IDS, 16, "tenant")]


# KV-01
@pytest.mark.parametrize(
    ("one", "other"), [([1, 23], [12, 3]), ([1, 2], [1, 2, 0]), ([0], [0, 0]), ([256], [0, 1])]
)
def test_blocks_that_look_alike_have_different_keys(one: list[int], other: list[int]) -> None:
    root = keys().root()

    assert keys().extend(root, one) != keys().extend(root, other)


# KV-01
@given(one=token_ids, other=token_ids)
def test_chains_share_exactly_their_common_leading_blocks(one: list[int], other: list[int]) -> None:
    first, second = keys().chain(one, 4), keys().chain(other, 4)

    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        end = 4 * (index + 1)
        assert (left == right) == (one[:end] == other[:end])
    assert len(set(first)) == len(first)


# KV-01
@given(ids=st.lists(st.integers(0, 9), min_size=8, max_size=8))
def test_same_tokens_after_another_parent_have_another_key(ids: list[int]) -> None:
    root = keys().root()
    nested = keys().extend(keys().extend(root, ids[:4]), ids[4:])

    assert nested != keys().extend(root, ids)
    assert nested != keys().extend(root, ids[4:])


# KV-02, KV-03
@given(one=st.text(max_size=8), other=st.text(max_size=8), ids=st.lists(st.integers(0, 9)))
def test_salts_share_blocks_only_when_they_are_equal(one: str, other: str, ids: list[int]) -> None:
    assert (keys().root(one) == keys().root(other)) == (one == other)
    blocks = set(keys().chain(ids, 2, one)) & set(keys().chain(ids, 2, other))
    assert bool(blocks) == (one == other and len(ids) >= 2)


# KV-02
def test_no_salt_and_the_empty_salt_are_the_same_and_no_other_is() -> None:
    assert keys().root() == keys().root("")
    assert keys().root("\0") != keys().root()
    assert keys().root(" ") != keys().root()


def test_unpaired_surrogates_in_a_salt_have_keys_of_their_own() -> None:
    assert keys().root("\ud800") != keys().root("\ud801")


# KV-02, KV-25
@given(
    one=st.dictionaries(st.text(max_size=4), field_values, max_size=3),
    other=st.dictionaries(st.text(max_size=4), field_values, max_size=3),
)
def test_fingerprints_are_equal_only_for_equal_fields(
    one: dict[str, str | int], other: dict[str, str | int]
) -> None:
    assert (layout_fingerprint(one) == layout_fingerprint(other)) == (one == other)


# KV-25
@pytest.mark.parametrize(
    ("name", "value"), [("model", "other"), ("layers", 31), ("block_size", 32), ("layers", "30")]
)
def test_each_field_of_the_layout_separates_blocks(name: str, value: str | int) -> None:
    changed = BlockKeys(layout_fingerprint({**FIELDS, name: value}))

    assert not set(changed.chain(TOKEN_IDS, 8)) & set(keys().chain(TOKEN_IDS, 8))


# KV-02
def test_names_and_values_that_run_together_stay_apart() -> None:
    assert layout_fingerprint({"a": "b", "c": "d"}) != layout_fingerprint({"a": "bc", "": "d"})
    assert layout_fingerprint({"cache_salt": "S"}) != layout_fingerprint({"adapter": "S"})
    assert layout_fingerprint({"a": ""}) != layout_fingerprint({})


def test_fingerprint_ignores_the_order_of_fields() -> None:
    assert layout_fingerprint(dict(reversed(FIELDS.items()))) == layout_fingerprint(FIELDS)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (15, 0), (16, 1), (17, 1), (32, 2), (33, 2)]
)
def test_only_full_blocks_have_keys(num_tokens: int, num_blocks: int) -> None:
    chain = keys().chain(list(range(num_tokens)), 16)

    assert len(chain) == num_blocks
    assert all(len(key) == KEY_BYTES for key in chain)


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_what_is_no_token_id_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        keys().extend(keys().root(), [token_id])


def test_a_parent_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="15 bytes"):
        keys().extend(b"\0" * 15, [1])


def test_difference_of_layouts_names_the_fields_that_differ() -> None:
    ours = {"dtype": "float32", "block_size": "16", "layers": "30"}
    theirs = {"dtype": "bfloat16", "block_size": "16", "kernels": "amx"}

    assert layout_difference(ours, theirs) == (
        "dtype is float32 here and bfloat16 there, "
        "kernels is not said here and amx there, "
        "layers is 30 here and not said there"
    )
    assert layout_difference(ours, ours) == ""
