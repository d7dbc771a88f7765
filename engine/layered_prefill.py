"""Long prompts beside decodes: some of the model's layers in each step, so that tokens keep coming.

Chunks short enough for steady steps would look at all earlier keys too often: twice the work, with
64 tokens at a time instead of 256. Layers can be computed one by one at no cost.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.batcher import Batch, ScheduledRequest
from engine.forward_batch import ForwardPass
from engine.request import Request

# What a layer takes at least, by clocks that do not see it.
_SHORTEST_S = 1e-6
# Prompts that take no longer than so many objectives are computed in one step, with its decodes: in
# several they would share time with others that begin meanwhile, and weights would be read twice.
_WHOLE = 2.5
# How much of what looking at earlier tokens took is taken from the last measurement.
_LEARNING = 0.1
# By how much the least that a token took is taken to be more with every measurement.
_FORGETTING = 1.001


@dataclass(frozen=True)
class Finished:
    """The prompts' part of a pass that has gone through all layers."""

    scheduled: list[ScheduledRequest]
    logits: npt.NDArray[np.float32]


class LayeredPrefill:
    """Owns at most one pass over prompts, which steps carry on from layer to layer."""

    def __init__(
        self,
        begin: Callable[[Sequence[ScheduledRequest]], ForwardPass],
        objective_s: float,
        *,
        few_tokens: int = 16,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`objective_s`: how long a step with decodes should take at most. `few_tokens` of a
        request are not worth a pass of their own.
        """
        self._begin = begin
        self._objective_s = objective_s
        self._few_tokens = few_tokens
        self._clock = clock
        self._pass: ForwardPass | None = None
        self._scheduled: list[ScheduledRequest] = []
        self._num_layers = 0
        # The step has prompts beside its decodes, and leaves the pass to the next.
        self._rests = False
        # What a token takes in all layers, with few before it to look at: the least of late.
        self._token_s = math.inf
        # What it takes longer for each token before it.
        self._context_s = 0.0

    @property
    def requests(self) -> Collection[Request]:
        """Whose tokens are under way: their blocks are written to, and they cannot be scheduled."""
        return [item.request for item in self._scheduled]

    @property
    def num_tokens_beside(self) -> int:
        """Tokens of whole prompts that decodes may share a step with, at most."""
        return int(_WHOLE * self._objective_s / self._token_s)

    def take_from(self, batch: Batch) -> None:
        """Take the prompts out of a batch that would hold up its decodes.

        Those that fit into a step together stay in it; those that fit into one of their own are
        left for the next; over all others a pass begins, if none is under way.
        """
        batch.computed_apart = self._scheduled
        rested, self._rests = self._rests, False
        if all(item.num_tokens > self._few_tokens for item in batch.scheduled):
            return
        kept: list[ScheduledRequest] = []
        beside: list[ScheduledRequest] = []
        apart: list[ScheduledRequest] = []
        for item in batch.scheduled:
            if item.num_tokens <= self._few_tokens:
                kept.append(item)
            elif self._fit_beside([*beside, item]):
                kept.append(item)
                beside.append(item)
            elif not self._fit_beside([item]):
                apart.append(item)
        batch.scheduled = kept
        # Not twice in a row, or a flow of short prompts would starve the long one.
        self._rests = bool(beside) and not rested
        if apart and not self._scheduled:
            self._scheduled = batch.computed_apart = apart
            self._pass = self._begin(apart)
            self._num_layers = self._pass.num_layers_left

    def advance(self, decoding_s: float | None) -> Finished | None:
        """Compute what a step has time for besides its decodes, which took `decoding_s`; without
        decodes, all that is left. Returns what was computed, after the last layer.
        """
        if self._pass is None or (self._rests and decoding_s is not None):
            return None
        num_layers, ends_at = self._pass.num_layers_left, math.inf
        if decoding_s is not None:
            # Never less time than the decodes have, or prompts would starve beside many of them.
            ends_at = self._clock() + max(self._objective_s - decoding_s, decoding_s)
            num_layers = 1
        logits = None
        while logits is None and num_layers > 0:
            layer_s, logits = self._compute(self._pass, num_layers)
            num_left = self._pass.num_layers_left
            num_layers = round(min((ends_at - self._clock()) / layer_s, num_left))
        if logits is None:
            return None
        finished = Finished(self._scheduled, logits)
        self._end()
        return finished

    def drop(self, requests: Collection[Request]) -> None:
        """Give the pass up if any of these is in it: their blocks are others' from now on."""
        if any(item.request in requests for item in self._scheduled):
            self._end()

    def _fit_beside(self, prompts: Sequence[ScheduledRequest]) -> bool:
        num_tokens = sum(item.num_tokens for item in prompts)
        if num_tokens * self._token_s <= self._objective_s / 2:
            return True
        # Not the pieces of a long prompt, whose decodes would pay for each.
        are_whole = all(item.samples and not item.is_continued for item in prompts)
        expected_s = sum(
            item.num_tokens * (self._token_s + item.mean_context * self._context_s)
            for item in prompts
        )
        return are_whole and expected_s <= _WHOLE * self._objective_s

    def _compute(
        self, under_way: ForwardPass, num_layers: int
    ) -> tuple[float, npt.NDArray[np.float32] | None]:
        """Compute so many layers more; also returns what each took."""
        started_at = self._clock()
        logits = under_way.advance(num_layers)
        layer_s = max((self._clock() - started_at) / num_layers, _SHORTEST_S)
        num_tokens = sum(item.num_tokens for item in self._scheduled)
        token_s = layer_s * self._num_layers / num_tokens
        context = sum(item.num_tokens * item.mean_context for item in self._scheduled) / num_tokens
        # What looks at much cannot tell whether the least has changed.
        forgetting = _FORGETTING if context <= num_tokens else 1.0
        self._token_s = min(token_s, self._token_s * forgetting)
        context_s = (token_s - self._token_s) / max(context, 1.0)
        self._context_s += _LEARNING * (context_s - self._context_s)
        return layer_s, logits

    def _end(self) -> None:
        self._pass = None
        self._scheduled = []
