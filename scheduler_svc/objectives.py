"""Times that were promised, and the refusal of requests that could not have them."""

from dataclasses import dataclass

from mesh import metrics
from mesh.errors import QueueFull
from scheduler_svc.admission import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, PriorityClass
from scheduler_svc.forecast import Forecast


@dataclass(frozen=True, slots=True)
class Objectives:
    """A request that would miss its objective is refused before it costs anything.

    None: nothing was promised.
    """

    online_ttft_s: float | None = None
    offline_ttft_s: float | None = None
    tbt_s: float | None = None
    # A prompt from this length on may start only while fewer such prompts than this share of
    # the prefill workers are being computed.
    long_prompt_tokens: int = 32_768
    long_prompt_share: float = 0.5

    def ttft_s(self, priority_class: PriorityClass) -> float | None:
        is_online = priority_class is PriorityClass.ONLINE
        return self.online_ttft_s if is_online else self.offline_ttft_s

    def check_forecast(self, expected: Forecast, ttft_objective_s: float | None) -> None:
        """By the load at the time when the prefill would end: that of now lags behind by one
        prefill, and refusing by it swings between too many and too few."""
        if ttft_objective_s is not None and expected.ttft_s > ttft_objective_s:
            raise _refusal(
                "ttft_objective",
                f"the first token would come after {expected.ttft_s:.1f} s, not within "
                f"{ttft_objective_s:.1f} s",
                expected.ttft_s - ttft_objective_s,
            )
        if self.tbt_s is not None and expected.step_s is not None and expected.step_s > self.tbt_s:
            raise _refusal(
                "tbt_objective",
                f"tokens would come every {1000 * expected.step_s:.0f} ms, not every "
                f"{1000 * self.tbt_s:.0f} ms",
                expected.ttft_s,
            )

    def check_waited(self, ttft_objective_s: float | None, waited_s: float) -> None:
        """Room for those who can still have what they want."""
        if ttft_objective_s is not None and waited_s > ttft_objective_s:
            raise _refusal(
                "ttft_objective", f"waited {waited_s:.1f} s for a place", MIN_RETRY_AFTER_S
            )


def _refusal(reason: str, message: str, retry_after_s: float) -> QueueFull:
    metrics.REJECTIONS.add(1, {"reason": reason})
    return QueueFull(
        message, retry_after_s=min(max(retry_after_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
    )
