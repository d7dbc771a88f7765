"""How a token is chosen: the parameters, the row-by-row sampler, the generator behind it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from engine.kernels.library import SAMPLING_DTYPE
from engine.request import InvalidParameter

# Below this, dividing by the temperature is of no use and greedy is what is meant.
GREEDY_TEMPERATURE = 1e-5
MAX_LOGPROBS = 20
# A repetition penalty below this is taken to be this: a logit divided by it, and then by the
# lowest temperature, is still a number.
_LEAST_PENALTY = 1e-20

Array = npt.NDArray[Any]

_UINT64 = (1 << 64) - 1
# Tokens within this of the best logit hold nearly all of the mass.
_LIKELY = 10.0


@dataclass(frozen=True)
class SamplingParams:
    """What the caller wants; the defaults change nothing about the model's distribution."""

    # New tokens at most, counted over the request's whole life.
    max_tokens: int
    temperature: float = 1.0
    # Keep the most likely tokens that together reach this mass; 0 keeps one.
    top_p: float = 1.0
    # Keep this many of the most likely tokens; 0 and -1: all.
    top_k: int = 0
    # Keep tokens with this share of the top probability.
    min_p: float = 0.0
    # Divides positive and multiplies negative logits of tokens in prompt or output.
    repetition_penalty: float = 1.0
    # Subtracted once from each token of the output.
    presence_penalty: float = 0.0
    # Subtracted per occurrence in the output.
    frequency_penalty: float = 0.0
    seed: int = 0
    # Nothing that would end the sequence is chosen before.
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    # Return log-probabilities, with this many alternatives.
    num_logprobs: int | None = None
    # The same for the tokens of the prompt, from what the model itself says.
    num_prompt_logprobs: int | None = None
    # Token sequences that must not appear.
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def changes_logits(self) -> bool:
        """Whether a row has to be prepared before a token is chosen from it."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.min_tokens
            or self.bad_words
        )

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidParameter for the first value that is out of range."""
        _check_number("temperature", self.temperature, 0, 2)
        _check_number("top_p", self.top_p, 0, 1)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("repetition_penalty", self.repetition_penalty, 0, 2)
        if self.repetition_penalty == 0:
            raise InvalidParameter("repetition_penalty", "repetition_penalty must be above 0")
        _check_int("top_k", self.top_k, -1, None)
        _check_int("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("num_logprobs", "num_prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                param = name.removeprefix("num_")
                _check_int(param, count, 0, min(MAX_LOGPROBS, vocab_size))
        for token_id in self.stop_token_ids:
            check_token_id("stop_token_ids", token_id, vocab_size)
        for token_id, bias in self.logit_bias.items():
            check_token_id("logit_bias", token_id, vocab_size)
            _check_number("logit_bias", bias, -100, 100)
        for word in self.bad_words:
            if not word:
                raise InvalidParameter("bad_words", "bad_words contains an empty sequence")
            for token_id in word:
                check_token_id("bad_words", token_id, vocab_size)


def check_token_id(param: str, token_id: object, vocab_size: int) -> None:
    """Raise InvalidParameter for what is no token of the vocabulary."""
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise InvalidParameter(
            param, f"{param}: {token_id!r} is not a token id from 0 to {vocab_size - 1}"
        )


def _check_number(param: str, value: object, low: float, high: float) -> None:
    # The comparison is false for NaN too.
    if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]
        raise InvalidParameter(param, f"{param} is {value!r}, expected a number in [{low}, {high}]")


def _check_int(param: str, value: object, low: int, high: int | None) -> None:
    if type(value) is not int or value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidParameter(param, f"{param} is {value!r}, expected an integer {bound}")


@dataclass(frozen=True)
class Candidate:
    """A token that could have been chosen."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's log-probability and the most likely alternatives, best first.

    Of a chosen token from the distribution after bias, penalties and masks, before temperature;
    of a prompt's token before them too.
    """

    token_id: int
    logprob: float
    top: tuple[Candidate, ...]


@dataclass(frozen=True)
class SampledToken:
    """What one row came to."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class SamplingInput(Protocol):
    """The part of a request that decides its next token."""

    @property
    def prompt_token_ids(self) -> list[int]: ...

    @property
    def output_token_ids(self) -> list[int]: ...

    @property
    def sampling_params(self) -> SamplingParams: ...


class NextToken(NamedTuple):
    """A token to draw: whose, and at which place of the sequence.

    Places beyond the request's next are for tokens after guesses. Only a request whose parameters
    leave the logits as they are has such: what they are changed by is what the request has.
    """

    request: SamplingInput
    position: int

    @classmethod
    def of(cls, request: SamplingInput, num_ahead: int = 0) -> "NextToken":
        """The request's next token, or one after it."""
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        return cls(request, num_tokens + num_ahead)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments.

    SplitMix64's finalizer over a counter: a request draws the same numbers on whichever
    worker, in whichever batch and however often it is resumed.
    """
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03) & _UINT64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _UINT64
    x ^= x >> 31
    return (x >> 11) * 2.0**-53


# Draws a token id per row of float32 logits[rows, vocab_size]; -1 for a row whose largest logit
# is not finite. Parameters are SAMPLING_DTYPE, one per row; temperature 0 is greedy.
Draw = Callable[[npt.NDArray[np.float32], Array], npt.NDArray[np.int64]]


class Sampler:
    """Turns rows of logits into tokens.

    Nothing that happens to a row depends on the other rows.
    """

    def __init__(self, eos_token_ids: frozenset[int], draw: Draw | None = None) -> None:
        """`draw`: the kernels' where they serve; by default the one of this module."""
        self._eos_token_ids = eos_token_ids
        self._draw = draw or draw_tokens

    def sample(
        self, logits: npt.NDArray[np.float32], wanted: Sequence[NextToken]
    ) -> list[SampledToken | None]:
        """Choose a token for each row; None where the row is no usable distribution.

        `logits`, float32[len(wanted), vocab_size], is overwritten.
        """
        if not wanted:
            return []
        for row, (request, _) in zip(logits, wanted, strict=True):
            if request.sampling_params.changes_logits:
                self._prepare(row, request)
        vocab_size = logits.shape[1]
        params = np.array(
            [_draw_params(token, vocab_size) for token in wanted], dtype=SAMPLING_DTYPE
        )
        return [
            None
            if token_id < 0
            else SampledToken(
                token_id, logprobs_of(token_id, row, request.sampling_params.num_logprobs)
            )
            for row, token_id, (request, _) in zip(
                logits, self._draw(logits, params).tolist(), wanted, strict=True
            )
        ]

    def _prepare(self, row: Array, request: SamplingInput) -> None:
        """Bias, then penalties, then masks."""
        params = request.sampling_params
        for token_id, bias in params.logit_bias.items():
            row[token_id] += np.float32(bias)
        _penalize(row, request)
        masked = [word[-1] for word in params.bad_words if _would_complete(word, request)]
        if len(request.output_token_ids) < params.min_tokens:
            masked += self._eos_token_ids | params.stop_token_ids
        if masked:
            row[masked] = -math.inf


def _penalize(row: Array, request: SamplingInput) -> None:
    params = request.sampling_params
    if params.repetition_penalty != 1:
        seen = np.unique(np.array(request.prompt_token_ids + request.output_token_ids))
        values = row[seen]
        penalty = np.float32(max(params.repetition_penalty, _LEAST_PENALTY))
        row[seen] = np.where(values > 0, values / penalty, values * penalty)
    if request.output_token_ids and (params.presence_penalty or params.frequency_penalty):
        seen, counts = np.unique(np.array(request.output_token_ids), return_counts=True)
        row[seen] -= (params.presence_penalty + counts * params.frequency_penalty).astype(
            np.float32
        )


def _would_complete(word: tuple[int, ...], request: SamplingInput) -> bool:
    """Whether the last token of `word`, chosen now, would complete it."""
    num_before = len(word) - 1
    tail = request.output_token_ids[max(0, len(request.output_token_ids) - num_before) :]
    if len(tail) < num_before:
        missing = num_before - len(tail)
        tail = request.prompt_token_ids[-missing:] + tail
    return num_before == 0 or tuple(tail) == word[:-1]


def _draw_params(token: NextToken, vocab_size: int) -> tuple[int, int, float, float, float, int]:
    """A row of SAMPLING_DTYPE."""
    params = token.request.sampling_params
    temperature = 0.0 if params.is_greedy else params.temperature
    top_k = min(max(params.top_k, 0), vocab_size)
    return params.seed, token.position, temperature, params.top_p, params.min_p, top_k


def draw_tokens(logits: npt.NDArray[np.float32], params: Array) -> npt.NDArray[np.int64]:
    """Draw tokens without the kernels; they agree with the kernels' but for rounding."""
    best = logits.argmax(axis=1)
    # A NaN anywhere in a row, an infinity, or nothing left to choose from.
    usable = np.isfinite(logits[np.arange(len(logits)), best])
    token_ids = np.where(usable, best, -1)
    for index in np.flatnonzero(usable & (params["temperature"] > 0)):
        token_ids[index] = _draw(logits[index], params[index])
    return token_ids


def _draw(logits: Array, params: Any) -> int:
    """Draw by the inverse of the cumulative distribution in token order."""
    row = logits / params["temperature"]
    weights = np.exp(row - row.max())
    number = uniform(int(params["seed"]), int(params["position"]))
    kept = _kept_token_ids(row, weights, params)
    if kept is None:
        return _inverse_cdf(weights, number)
    return int(kept[_inverse_cdf(weights[kept], number)])


def _inverse_cdf(weights: Array, number: float) -> int:
    cdf = np.cumsum(weights, dtype=np.float64)
    # Rounding must not carry the target to the very end, past the last possible token.
    target = min(number * cdf[-1], np.nextafter(cdf[-1], 0.0))
    return int(np.searchsorted(cdf, target, side="right"))


def _kept_token_ids(row: Array, weights: Array, params: Any) -> Array | None:
    """The tokens that top_k, then top_p, then min_p leave, in token order; None: all."""
    top_k = int(params["top_k"]) if 0 < params["top_k"] < len(row) else None
    if top_k is None and params["top_p"] >= 1 and params["min_p"] <= 0:
        return None
    # Each of the three keeps a beginning of the tokens in order of probability, mostly a short
    # one; only where the likely ones do not settle it, all are sorted.
    candidates = _most_likely(row, _LIKELY)
    num_kept = _num_kept(candidates, row, weights, top_k, params)
    if num_kept is None:
        candidates = _most_likely(row, math.inf)
        num_kept = _num_kept(candidates, row, weights, top_k, params)
    return np.sort(candidates[:num_kept])


def _num_kept(
    candidates: Array, row: Array, weights: Array, top_k: int | None, params: Any
) -> int | None:
    """How many of the sorted candidates stay; None: perhaps more than there are candidates."""
    is_partial = len(candidates) < len(row)
    if top_k is not None:
        if is_partial and top_k > len(candidates):
            return None
        candidates, is_partial = candidates[:top_k], False
    num_kept = len(candidates)
    if params["top_p"] < 1:
        cdf = np.cumsum(weights[candidates], dtype=np.float64)
        total = weights.sum(dtype=np.float64) if top_k is None else cdf[-1]
        num_kept = min(num_kept, int(np.searchsorted(cdf, float(params["top_p"]) * total)) + 1)
    if params["min_p"] > 0:
        num_kept = int(np.count_nonzero(weights[candidates[:num_kept]] >= params["min_p"]))
    return None if is_partial and num_kept == len(candidates) else num_kept


def _most_likely(row: Array, margin: float) -> Array:
    """Ids of the tokens within `margin` of the best, in order; among equals the lowest first."""
    token_ids = np.flatnonzero(row >= row.max() - np.float32(margin))
    return token_ids[np.argsort(-row[token_ids], kind="stable")]


def logprobs_of(token_id: int, row: Array, count: int | None) -> TokenLogprobs | None:
    """What `row` says of a token, with `count` alternatives; None for None."""
    if count is None:
        return None
    largest = row.max()
    log_total = float(largest) + math.log(np.exp(row - largest).sum(dtype=np.float64))
    best: Array = row[:0]
    if count > 0:
        best = _most_likely(row, _LIKELY)
        if len(best) < count:
            best = _most_likely(row, math.inf)
    # Masked tokens are no alternatives.
    top = [
        Candidate(int(other), float(row[other]) - log_total)
        for other in best[:count]
        if row[other] > -math.inf
    ]
    return TokenLogprobs(token_id, float(row[token_id]) - log_total, tuple(top))
