"""How long things take, learnt from requests that are over."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.workers import Role

_MIN_SAMPLES = 16
# Weight that a sample keeps when the next one comes: about the last 200 count.
_MEMORY = 0.995
# Pulls coefficients that the samples say nothing about to zero.
_RIDGE = 1e-6


class LinearModel:
    """Least squares over the samples of late, with coefficients that are never negative."""

    def __init__(self, num_features: int, min_samples: int = _MIN_SAMPLES) -> None:
        self._min_samples = min_samples
        self._num_samples = 0
        self._products: NDArray[np.float64] = np.zeros((num_features, num_features))
        self._targets: NDArray[np.float64] = np.zeros(num_features)
        self._coefficients: NDArray[np.float64] | None = None

    @property
    def is_fitted(self) -> bool:
        return self._num_samples >= self._min_samples

    def observe(self, features: Sequence[float], target: float) -> None:
        row = np.asarray(features, dtype=np.float64)
        # Relative errors count: a short prompt must be as well predicted as a long one.
        weight = 1.0 / max(target, 1e-3) ** 2
        self._products = _MEMORY * self._products + weight * np.outer(row, row)
        self._targets = _MEMORY * self._targets + weight * target * row
        self._num_samples += 1
        self._coefficients = None

    def predict(self, features: Sequence[float]) -> float:
        assert self.is_fitted
        if self._coefficients is None:
            self._coefficients = self._fit()
        return float(self._coefficients @ np.asarray(features, dtype=np.float64))

    def _fit(self) -> NDArray[np.float64]:
        """Leave out the most negative coefficient until there is none."""
        active = np.ones(len(self._targets), dtype=bool)
        fitted = np.zeros(len(self._targets))
        scale = np.trace(self._products) or 1.0
        while active.any():
            products = self._products[np.ix_(active, active)]
            ridge = _RIDGE * scale * np.eye(len(products))
            part = np.linalg.solve(products + ridge, self._targets[active])
            fitted[:] = 0.0
            fitted[active] = part
            if (part >= 0).all():
                break
            active[int(np.argmin(fitted))] = False
        return np.maximum(fitted, 0.0)


class PrefillTime:
    """Seconds to compute a prompt: a fixed part, one per token, and one per token it looks at."""

    def __init__(self) -> None:
        self._model = LinearModel(3)

    @property
    def is_fitted(self) -> bool:
        return self._model.is_fitted

    def observe(self, num_tokens: int, num_cached_tokens: int, seconds: float) -> None:
        self._model.observe(_prefill_features(num_tokens, num_cached_tokens), seconds)

    def predict(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        return self._model.predict(_prefill_features(num_tokens, num_cached_tokens))

    def backlog(self, num_tokens: int) -> float:
        """Seconds until so many tokens of other prompts are computed."""
        return self.predict(num_tokens) if num_tokens else 0.0


def _prefill_features(num_tokens: int, num_cached_tokens: int) -> tuple[float, float, float]:
    kilo_tokens = num_tokens / 1000
    return 1.0, kilo_tokens, kilo_tokens * (num_cached_tokens / 1000 + kilo_tokens / 2)


@dataclass
class Estimates:
    """What was measured for one model. None: not enough yet."""

    prefill: dict[Role, PrefillTime] = field(
        default_factory=lambda: {role: PrefillTime() for role in Role}
    )
    _transfer: LinearModel = field(default_factory=lambda: LinearModel(2))
    _step: LinearModel = field(default_factory=lambda: LinearModel(2))
    # Mean time between a request's first token and its end.
    decode_s: float | None = None

    def prefill_time(self, role: Role) -> PrefillTime | None:
        """A role that has computed too few prompts is taken to be as fast as the other."""
        for one in (role, *Role):
            if self.prefill[one].is_fitted:
                return self.prefill[one]
        return None

    def observe_transfer(self, num_tokens: int, seconds: float) -> None:
        self._transfer.observe((1.0, num_tokens / 1000), seconds)

    def transfer_s(self, num_tokens: int) -> float | None:
        if not self._transfer.is_fitted:
            return None
        return self._transfer.predict((1.0, num_tokens / 1000))

    def observe_decode(self, num_tokens: int, num_running: int, seconds: float) -> None:
        """A request made so many tokens after its first beside so many others."""
        self.decode_s = seconds if self.decode_s is None else 0.95 * self.decode_s + 0.05 * seconds
        if num_tokens > 0:
            self._step.observe((1.0, float(num_running)), seconds / num_tokens)

    def step_s(self, num_running: float) -> float | None:
        """Time between two tokens of a request among so many on its worker."""
        return self._step.predict((1.0, num_running)) if self._step.is_fitted else None

    @property
    def prefill_tokens_per_second(self) -> float:
        model = self.prefill[Role.PREFILL]
        return 1000 / max(model.predict(1000), 1e-9) if model.is_fitted else 0.0

    @property
    def transfer_tokens_per_second(self) -> float:
        seconds = self.transfer_s(1000)
        return 0.0 if seconds is None else 1000 / max(seconds, 1e-9)
