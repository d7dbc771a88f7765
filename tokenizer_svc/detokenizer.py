"""The detokenizer that suits a vocabulary, and the one for tokens that depend on each other."""

from collections.abc import Sequence

from mesh.text.detokenizer import REPLACEMENT, BytesDetokenizer, Detokenizer
from tokenizer_svc.vocabulary import Vocabulary

# For decoders in which a token's text depends on its neighbours.
_NUM_CONTEXT_TOKENS = 5
# No character has so many tokens: what is still unreadable then stays so.
_MAX_UNREAD_TOKENS = 8


def make_detokenizer(
    vocabulary: Vocabulary, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
) -> Detokenizer:
    """A detokenizer for what follows a prompt; the prompt's own text is never returned."""
    skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
    prompt = [token_id for token_id in prompt_token_ids if token_id not in skipped]
    if vocabulary.is_byte_level:
        return BytesDetokenizer(vocabulary.token_bytes, prompt, skipped)
    return _ContextDetokenizer(vocabulary, prompt, skipped)


class _ContextDetokenizer:
    """For other vocabularies: each delta is what a token adds to its decoded context."""

    def __init__(
        self, vocabulary: Vocabulary, prompt: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._token_ids = self._whole_chars(prompt[-_NUM_CONTEXT_TOKENS:])
        # Tokens before this one are context: their text was returned, or is the prompt's.
        self._num_read = len(self._token_ids)
        self._context = self._decode(self._token_ids)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped or not self._vocabulary.token_bytes[token_id]:
            return ""
        self._token_ids.append(token_id)
        num_unread = len(self._token_ids) - self._num_read
        text = self._decode(self._token_ids)
        if text.endswith(REPLACEMENT) and num_unread < _MAX_UNREAD_TOKENS:
            return ""
        return self._read(text)

    def flush(self) -> str:
        return self._read(self._decode(self._token_ids))

    def _read(self, text: str) -> str:
        delta = text[len(self._context) :]
        if delta:
            del self._token_ids[: self._num_read]
            self._num_read = len(self._token_ids)
            self._context = self._decode(self._token_ids)
        return delta

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._vocabulary.decode(token_ids, skip_special_tokens=False)

    def _whole_chars(self, token_ids: Sequence[int]) -> list[int]:
        kept = list(token_ids)
        while kept and self._decode(kept).endswith(REPLACEMENT):
            kept.pop()
        return kept
