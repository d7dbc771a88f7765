"""Log-probabilities in the two shapes of OpenAI's APIs."""

import codecs
from collections.abc import Iterable, Mapping, Sequence

from gateway.generation import Delta
from gateway.openai.responses import CompletionLogprobs, TokenLogprob, TopLogprob
from mesh.v1 import types_pb2

# JSON has no infinity: what OpenAI reports for a token that cannot occur.
_IMPOSSIBLE = -9999.0


def chat_logprobs(delta: Delta, num_top: int) -> list[TokenLogprob]:
    """One entry a token for `choices[].logprobs.content`."""
    return [
        {
            **_described(token.token_id, token.logprob, delta.token_bytes),
            "top_logprobs": [
                _described(top.token_id, top.logprob, delta.token_bytes)
                for top in token.top[:num_top]
            ],
        }
        for token in delta.logprobs
    ]


def no_logprobs() -> CompletionLogprobs:
    """The lists of no tokens."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def extend(lists: CompletionLogprobs, more: CompletionLogprobs) -> None:
    """Add the entries of more tokens."""
    lists["tokens"] += more["tokens"]
    lists["token_logprobs"] += more["token_logprobs"]
    lists["top_logprobs"] += more["top_logprobs"]
    lists["text_offset"] += more["text_offset"]


class LogprobLists:
    """Builds the parallel lists of the completions API for one choice."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._num_chars = 0
        # Characters may be split over tokens: an offset counts complete ones.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def lists(self, delta: Delta) -> CompletionLogprobs:
        """The lists for the tokens of `delta`."""
        return self._lists(((one.token_id, one) for one in delta.logprobs), delta.token_bytes)

    def prompt_lists(self, prompt_token_ids: Sequence[int], delta: Delta) -> CompletionLogprobs:
        """The lists for an echoed prompt, from its sequence's first delta.

        Nothing comes before the first token that could make it likely or unlikely.
        """
        described = zip(prompt_token_ids, (None, *delta.prompt_logprobs), strict=True)
        return self._lists(described, delta.token_bytes)

    def _lists(
        self,
        tokens: Iterable[tuple[int, types_pb2.TokenLogprobs | None]],
        token_bytes: Mapping[int, bytes],
    ) -> CompletionLogprobs:
        made = no_logprobs()
        for token_id, logprobs in tokens:
            raw = token_bytes.get(token_id, b"")
            made["tokens"].append(_text(raw))
            made["token_logprobs"].append(None if logprobs is None else _finite(logprobs.logprob))
            made["top_logprobs"].append(
                None if logprobs is None else self._top(logprobs, token_bytes)
            )
            made["text_offset"].append(self._num_chars)
            self._num_chars += len(self._decoder.decode(raw))
        return made

    def _top(
        self, token: types_pb2.TokenLogprobs, token_bytes: Mapping[int, bytes]
    ) -> dict[str, float]:
        top: dict[str, float] = {}
        for candidate in token.top[: self._num_top]:
            # Two tokens may read the same: the likelier one, which comes first, stays.
            top.setdefault(
                _text(token_bytes.get(candidate.token_id, b"")), _finite(candidate.logprob)
            )
        top.setdefault(_text(token_bytes.get(token.token_id, b"")), _finite(token.logprob))
        return top


def _described(token_id: int, logprob: float, token_bytes: Mapping[int, bytes]) -> TopLogprob:
    raw = token_bytes.get(token_id, b"")
    return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
