"""The one block-hash function: content keys of KV cache blocks."""

import hashlib
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence

KEY_BYTES = 16

# Every key begins with the version of this encoding, so that two versions never meet.
_VERSION = b"pdmesh.kv.1"
_UINT32_CODE = "I" if array("I").itemsize == 4 else "L"


def layout_fingerprint(fields: Mapping[str, str | int]) -> str:
    """A name for everything that two engines must share to exchange blocks.

    Equal mappings, in whatever order, give equal fingerprints; `1` and `"1"` differ.
    """
    encoded = _text(_VERSION + b".layout") + _fields(fields)
    return hashlib.sha256(encoded).hexdigest()[: 2 * KEY_BYTES]


def layout_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """In which fields two layouts differ, for people; empty if in none that is known."""
    return ", ".join(
        f"{name} is {ours.get(name, 'not said')} here and {theirs.get(name, 'not said')} there"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    )


class BlockKeys:
    """Keys of full blocks for one layout, the same in every process and machine.

        root = H(version, "root", layout fingerprint, extras)
        key  = H(version, "block", key of the block before, token ids as u32 LE)

    Each part is typed and has its length in front, so no two different inputs are
    written as the same bytes. Keys are SHA-256 cut to 128 bits.
    """

    def __init__(self, layout_fingerprint: str) -> None:
        self._root_prefix = _text(_VERSION + b".root") + _text(layout_fingerprint.encode())
        self._block_prefix = _text(_VERSION + b".block")

    def root(self, cache_salt: str = "") -> bytes:
        """Where a chain begins; requests share blocks only under equal salts.

        The empty salt is no salt.
        """
        extras = _fields({"cache_salt": cache_salt} if cache_salt else {})
        return hashlib.sha256(self._root_prefix + extras).digest()[:KEY_BYTES]

    def extend(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The key of the block that holds `token_ids` after the blocks of `parent`."""
        if len(parent) != KEY_BYTES:
            raise ValueError(f"parent has {len(parent)} bytes, not {KEY_BYTES}")
        count = struct.pack("<I", len(token_ids))
        encoded = self._block_prefix + parent + count + _u32_le(token_ids)
        return hashlib.sha256(encoded).digest()[:KEY_BYTES]

    def chain(self, token_ids: Sequence[int], block_size: int, cache_salt: str = "") -> list[bytes]:
        """Keys of the full blocks of a sequence, in order; a partial block has none."""
        keys: list[bytes] = []
        parent = self.root(cache_salt)
        for start in range(0, len(token_ids) - block_size + 1, block_size):
            parent = self.extend(parent, token_ids[start : start + block_size])
            keys.append(parent)
        return keys


def _u32_le(token_ids: Sequence[int]) -> bytes:
    """OverflowError for what is not an unsigned 32-bit number."""
    values = array(_UINT32_CODE, token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _fields(fields: Mapping[str, str | int]) -> bytes:
    parts = [struct.pack("<I", len(fields))]
    for name in sorted(fields):
        parts += [_text(name.encode()), _value(fields[name])]
    return b"".join(parts)


def _text(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


def _value(value: str | int) -> bytes:
    if isinstance(value, str):
        # A salt is the client's text and may hold unpaired surrogates.
        return b"s" + _text(value.encode("utf-8", "surrogatepass"))
    return b"i" + _text(str(int(value)).encode())
