"""How few tokens a text can have, told from its size alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizer_svc.vocabulary import Vocabulary


@dataclass(frozen=True)
class LengthBound:
    """For vocabularies in which a text's bytes are shared out among its tokens."""

    max_bytes_per_token: int
    # Bytes without a token of their own; some vocabularies drop them.
    lost_bytes: bytes

    def least_num_tokens(self, text: str) -> int:
        num_bytes = len(text.encode().translate(None, self.lost_bytes))
        return -(-num_bytes // self.max_bytes_per_token)


def length_bound(tokenizer_json: Mapping[str, Any], vocabulary: Vocabulary) -> LengthBound | None:
    """None where a text may be rewritten or cut before it is shared out."""
    strips = any(
        token["lstrip"] or token["rstrip"] for token in tokenizer_json.get("added_tokens", ())
    )
    if (
        strips
        or not vocabulary.is_byte_level
        or tokenizer_json.get("normalizer") is not None
        or not _keeps_all(tokenizer_json.get("pre_tokenizer"))
    ):
        return None
    known = {data for data in vocabulary.token_bytes if len(data) == 1}
    lost = bytes(byte for byte in range(256) if bytes([byte]) not in known)
    return LengthBound(max(map(len, vocabulary.token_bytes)), lost)


def _keeps_all(pre_tokenizer: Any) -> bool:
    if not isinstance(pre_tokenizer, dict):
        return False
    if pre_tokenizer.get("type") == "Sequence":
        return all(map(_keeps_all, pre_tokenizer.get("pretokenizers", ())))
    if pre_tokenizer.get("type") == "Split":
        return pre_tokenizer.get("behavior") != "Removed"
    return pre_tokenizer.get("type") in ("ByteLevel", "Digits")
