"""Token ids to text, one at a time, never half a character."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizer_svc.vocabulary import Vocabulary

_REPLACEMENT = "\ufffd"
_MAX_BYTES_OF_CHAR = 4
# For decoders in which a token's text depends on its neighbours.
_NUM_CONTEXT_TOKENS = 5
# No character has so many tokens: what is still unreadable then stays so.
_MAX_UNREAD_TOKENS = 8


class Detokenizer(Protocol):
    """The text of one sequence as it grows."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; often none."""
        ...

    def flush(self) -> str:
        """What an unfinished character leaves, once no token will follow."""
        ...


def make_detokenizer(
    vocabulary: Vocabulary, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
) -> Detokenizer:
    """A detokenizer for what follows a prompt; the prompt's own text is never returned."""
    skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
    prompt = [token_id for token_id in prompt_token_ids if token_id not in skipped]
    if vocabulary.is_byte_level:
        return _BytesDetokenizer(vocabulary, prompt, skipped)
    return _ContextDetokenizer(vocabulary, prompt, skipped)


class _BytesDetokenizer:
    """For byte-level vocabularies: concatenated bytes through a UTF-8 decoder."""

    def __init__(
        self, vocabulary: Vocabulary, prompt: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(self._end_of(prompt))
        # The prompt may end inside a character, which the output may or may not go on with.
        self._is_inside_prompt_char = bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        data = self._token_bytes[token_id]
        if self._is_inside_prompt_char and data:
            return self._push_first(data)
        return self._decoder.decode(data)

    def flush(self) -> str:
        if self._is_inside_prompt_char:
            return ""
        return self._decoder.decode(b"", final=True)

    def _push_first(self, data: bytes) -> str:
        self._is_inside_prompt_char = False
        text = self._decoder.decode(data[:1])
        if _REPLACEMENT in text:
            # Not a continuation: the broken character is the prompt's alone.
            self._decoder.reset()
            text = self._decoder.decode(data[:1])
        return text + self._decoder.decode(data[1:])

    def _end_of(self, prompt: Sequence[int]) -> bytes:
        end = b""
        for token_id in reversed(prompt):
            end = self._token_bytes[token_id] + end
            if len(end) >= _MAX_BYTES_OF_CHAR:
                break
        return end


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
        if text.endswith(_REPLACEMENT) and num_unread < _MAX_UNREAD_TOKENS:
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
        while kept and self._decode(kept).endswith(_REPLACEMENT):
            kept.pop()
        return kept
