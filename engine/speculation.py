"""Speculative decoding without a second model: guess what comes next from what came before.

A guess is computed in the same step as the token it follows, one row more. Since a row's
arithmetic does not depend on its neighbours and its random number only on its position, a guess
that is what the sampler chooses anyway is exactly what the next step would have brought.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from engine.config import SpeculationLimits
from engine.request import Request
from engine.sampling import SamplingParams

# The chance that a guess is right is taken to be this before any was tried; each one that was
# moves it by the second, and a step without any moves it back by the third: or a request whose
# guesses were wrong for a while would never try again.
_FIRST_ACCEPTANCE = 0.5
_ACCEPTANCE_STEP = 0.1
_OBLIVION_STEP = 0.01
# Each token that is drawn needs a row of logits as wide as the vocabulary.
_MAX_LOGITS_ROWS = 64


@dataclass(frozen=True)
class StepCosts:
    """What a step takes; only the ratios matter (`docs/benchmarks.md`, "Speculative decoding")."""

    # Of reading the weights, however few tokens there are.
    fixed: float
    # Of each sequence, its first row included.
    sequence: float
    # Of each further row.
    row: float
    # Of each further tile that rows need, and the rows of a tile.
    tile: float = 0.0
    tile_rows: int = 1

    def of(self, num_sequences: int, num_guesses: int) -> float:
        num_tiles = -(-(num_sequences + num_guesses) // self.tile_rows)
        return (
            self.fixed
            + self.sequence * num_sequences
            + self.row * num_guesses
            + self.tile * (num_tiles - 1)
        )


# In ms of the default model on two cores.
COSTS_BY_ROWS = StepCosts(fixed=2.0, sequence=0.6, row=0.45)
COSTS_BY_TILES = StepCosts(fixed=3.0, sequence=0.45, row=0.14, tile=1.7, tile_rows=16)


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

    def __init__(
        self, limits: SpeculationLimits, max_model_len: int, costs: StepCosts = COSTS_BY_ROWS
    ) -> None:
        self._limits = limits
        self._max_model_len = max_model_len
        self._costs = costs
        self._histories: WeakKeyDictionary[Request, _History] = WeakKeyDictionary()
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted = [0] * limits.num_speculative_tokens

    def propose(self, requests: Sequence[Request], budget: int) -> list[list[int]]:
        """Guess tokens after the last ones of the requests that decode in a step.

        Each gets a draft, which may be empty; together they have at most `budget` tokens, and as
        many as bring most tokens for the step's time.
        """
        drafts = [self._draft(request) for request in requests]
        # The chance of a guess is that of all guesses up to it: a draft's beginning is never less.
        chances = sorted(
            (
                (history.acceptance ** (index + 1), number)
                for number, (history, draft) in enumerate(drafts)
                for index in range(len(draft))
            ),
            reverse=True,
        )
        most = min(budget, _MAX_LOGITS_ROWS - len(requests), len(chances))
        num_taken, num_expected = 0, float(len(requests))
        best = num_expected / self._costs.of(len(requests), 0)
        for number, (chance, _) in enumerate(chances[: max(0, most)], 1):
            num_expected += chance
            rate = num_expected / self._costs.of(len(requests), number)
            if rate > best:
                best, num_taken = rate, number
        lengths = [0] * len(requests)
        for _, number in chances[:num_taken]:
            lengths[number] += 1
        for history, draft in drafts:
            if draft and not num_taken:
                history.acceptance += _OBLIVION_STEP * (_FIRST_ACCEPTANCE - history.acceptance)
        return [draft[:length] for (_, draft), length in zip(drafts, lengths, strict=True)]

    def _draft(self, request: Request) -> tuple["_History", list[int]]:
        history = self._histories.get(request)
        if history is None:
            history = self._histories[request] = _History()
        params = request.sampling_params
        room = min(
            self._limits.num_speculative_tokens,
            # The step brings one token more than it accepts.
            params.max_tokens - len(request.output_token_ids) - 1,
            self._max_model_len - request.num_tokens - 1,
        )
        if room < 1 or request.hold_blocks or not _is_plain(params):
            return history, []
        history.extend(request)
        return history, history.lookup(self._limits, room)

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

    def lookup(self, limits: SpeculationLimits, num_wanted: int) -> list[int]:
        """What came after the latest earlier place where the last tokens are, as many of them as
        have one: up to `num_wanted` tokens.
        """
        text = self._text
        for length in range(limits.prompt_lookup_max, limits.prompt_lookup_min - 1, -1):
            begin = text.rfind(text[-length:], 0, len(text) - 1)
            if begin >= 0 and length < len(text):
                end = begin + length
                return list(map(ord, text[end : end + num_wanted]))
        return []


def count_accepted(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """Leading tokens of the draft that the model chose as well."""
    for index, (guess, token_id) in enumerate(zip(draft, chosen, strict=False)):
        if guess != token_id:
            return index
    return min(len(draft), len(chosen))
