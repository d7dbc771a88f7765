"""Speculative decoding without a second model: guess what comes next from what came before.

A guess is computed in the same step as the token it follows, one row more. Since a row's
arithmetic does not depend on its neighbours and its random number only on its position, a guess
that is what the sampler chooses anyway is exactly what the next step would have brought.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from engine.config import SpeculationLimits
from engine.request import Request
from engine.sampling import SamplingParams

# What a request's drafts are taken to be worth before any was tried, and how far each one that
# was tried moves that.
_FIRST_ACCEPTANCE = 0.5
_ACCEPTANCE_STEP = 0.1
# Beyond this a longer draft is no worse a bet than a shorter one.
_MOST_ACCEPTANCE = 0.98
# Each drafted token needs a row of logits as wide as the vocabulary.
_MAX_LOGITS_ROWS = 64


@dataclass(frozen=True)
class DraftCounts:
    """What was guessed since the start, and what of it was what the model chose."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    # Of the n-th token of all drafts.
    num_accepted_per_position: tuple[int, ...] = ()

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted_per_position)


NO_DRAFTS = DraftCounts()


class Speculator:
    """Drafts by prompt lookup (A. Saxena, 2023): what followed when the last tokens came before."""

    def __init__(self, limits: SpeculationLimits, max_model_len: int) -> None:
        self._limits = limits
        self._max_model_len = max_model_len
        self._histories: WeakKeyDictionary[Request, _History] = WeakKeyDictionary()
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted = [0] * limits.num_speculative_tokens

    def propose(self, request: Request, num_decoding: int) -> list[int]:
        """Guess the tokens after the request's last; they may be none.

        `num_decoding` requests get a token in the step: the more they are, the less a row costs
        that is sure to bring one, and the surer has a guess to be.
        """
        params = request.sampling_params
        if request.hold_blocks or not _is_plain(params):
            return []
        history = self._histories.get(request)
        if history is None:
            history = self._histories[request] = _History()
        room = min(
            self._limits.num_speculative_tokens,
            _MAX_LOGITS_ROWS // num_decoding - 1,
            # The step brings one token more than it accepts.
            params.max_tokens - len(request.output_token_ids) - 1,
            self._max_model_len - request.num_tokens - 1,
        )
        if room < 1:
            return []
        history.extend(request)
        length, draft = history.lookup(self._limits, room)
        worthwhile = _worthwhile_length(history.acceptance, num_decoding)
        if length == self._limits.prompt_lookup_max:
            # One at least, or nobody would notice that drafts have become better.
            worthwhile = max(1, worthwhile)
        return draft[:worthwhile]

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Learn what came of a draft."""
        self._num_drafts += 1
        self._num_draft_tokens += num_drafted
        for position in range(num_accepted):
            self._num_accepted[position] += 1
        history = self._histories[request]
        for is_accepted in [1] * num_accepted + [0] * (num_accepted < num_drafted):
            history.acceptance += _ACCEPTANCE_STEP * (is_accepted - history.acceptance)

    def counts(self) -> DraftCounts:
        return DraftCounts(self._num_drafts, self._num_draft_tokens, tuple(self._num_accepted))


def _is_plain(params: SamplingParams) -> bool:
    """Whether a row needs nothing but a draw; where it does, it costs more than it may bring."""
    scores = params.num_logprobs is not None or params.num_prompt_logprobs is not None
    return not (scores or params.changes_logits)


def _worthwhile_length(acceptance: float, num_decoding: int) -> int:
    """Tokens of a draft whose chance, that all before them are right too, is worth a row.

    A step has a fixed cost, of reading the weights, and one for each row. A drafted row costs about
    half of what a token does once many share the fixed part, and next to nothing of what it does
    for one alone (`docs/benchmarks.md`, "Speculative decoding").
    """
    least = 0.6 * num_decoding / (num_decoding + 6)
    return int(math.log(least) / math.log(min(acceptance, _MOST_ACCEPTANCE)))


class _History:
    """A request's tokens, kept from step to step as characters, and how its drafts did.

    Nothing in Python searches as fast as a string; there are more characters than tokens in any
    vocabulary.
    """

    def __init__(self) -> None:
        self.acceptance = _FIRST_ACCEPTANCE
        self._text = ""

    def extend(self, request: Request) -> None:
        added = request.slice_token_ids(len(self._text), request.num_tokens)
        self._text += "".join(map(chr, added))

    def lookup(self, limits: SpeculationLimits, num_wanted: int) -> tuple[int, list[int]]:
        """What came after the latest earlier place where the last tokens are: the longest run of
        them that has one, its length, and up to `num_wanted` tokens.
        """
        text = self._text
        for length in range(limits.prompt_lookup_max, limits.prompt_lookup_min - 1, -1):
            begin = text.rfind(text[-length:], 0, len(text) - 1)
            if begin >= 0 and length < len(text):
                end = begin + length
                return length, list(map(ord, text[end : end + num_wanted]))
        return 0, []


def count_accepted(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """Leading tokens of the draft that the model chose as well."""
    for index, (guess, token_id) in enumerate(zip(draft, chosen, strict=False)):
        if guess != token_id:
            return index
    return min(len(draft), len(chosen))
