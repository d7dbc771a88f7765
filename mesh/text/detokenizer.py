"""Token ids to text, one at a time, never half a character."""

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_MAX_BYTES_OF_CHAR = 4


class Detokenizer(Protocol):
    """The text of one sequence as it grows."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; often none."""
        ...

    def flush(self) -> str:
        """What an unfinished character leaves, once no token will follow."""
        ...


class BytesDetokenizer:
    """For byte-level vocabularies: concatenated bytes through a UTF-8 decoder."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        prompt_token_ids: Sequence[int],
        skipped_ids: Collection[int] = (),
    ) -> None:
        """The prompt's own text is never returned; tokens that are skipped have none."""
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(self._end_of(prompt_token_ids))
        # The prompt may end inside a character, which the output may or may not go on with.
        self._is_inside_prompt_char = bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
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
        if REPLACEMENT in text:
            # Not a continuation: the broken character is the prompt's alone.
            self._decoder.reset()
            text = self._decoder.decode(data[:1])
        return text + self._decoder.decode(data[1:])

    def _end_of(self, prompt_token_ids: Sequence[int]) -> bytes:
        end = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skipped_ids:
                end = self._token_bytes[token_id] + end
            if len(end) >= _MAX_BYTES_OF_CHAR:
                break
        return end
