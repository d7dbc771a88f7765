"""A model's tokens as bytes, and whole sequences of them as text."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from mesh.text.token_bytes import TokenBytes

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "▁"


class Vocabulary:
    """Every id that a model can produce.

    Ids without a token (weights are often padded to a round number of rows) stand
    for no text.
    """

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: dict[str, Any], size: int) -> None:
        self.size = size
        self._tokenizer = tokenizer
        self.special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        # Then every token is a run of bytes, whatever stands beside it.
        self.is_byte_level = _is_byte_level(tokenizer_json.get("decoder"))
        to_bytes = _byte_level_bytes if self.is_byte_level else _piece_bytes
        # Each token's own bytes.
        self.token_bytes: Sequence[bytes] = [
            to_bytes(tokenizer.id_to_token(i) or "") for i in range(size)
        ]
        self._bytes = TokenBytes(self.token_bytes, self.special_ids)

    def check(self, token_ids: Iterable[int]) -> None:
        """Raise UnknownToken unless all ids exist."""
        self._bytes.check(token_ids)

    def without_specials(self, token_ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id not in self.special_ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence; invalid UTF-8 becomes U+FFFD."""
        if skip_special_tokens:
            token_ids = self.without_specials(token_ids)
        if self.is_byte_level:
            table = self.token_bytes
            return b"".join([table[token_id] for token_id in token_ids]).decode("utf-8", "replace")
        # Unlike `decode`, the batch form lets other threads run meanwhile.
        (text,) = self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)
        return text


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        return [_is_byte_level(one) for one in decoder.get("decoders", [])] == [True]
    return bool(decoder.get("type") == "ByteLevel")


def _byte_of_char() -> dict[str, int]:
    """The printable stand-in that GPT-2 chose for each byte, turned round."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        # An added token, which is spelled as it reads.
        return token.encode()


def _piece_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece or WordPiece token, as they read inside a text."""
    if (byte := _BYTE_PIECE.fullmatch(token)) is not None:
        return bytes([int(byte[1], 16)])
    return token.replace(_METASPACE, " ").removeprefix("##").encode()
