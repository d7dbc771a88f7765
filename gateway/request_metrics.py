"""A finished request on /metrics."""

from gateway.errors import CLIENT_CLOSED_REQUEST, OK
from gateway.finished import FinishedRequest
from mesh import metrics

# From the first step of the prompt to the last token, wherever those ran.
_INFERENCE = ("prefill_compute", "kv_transfer", "decode_wait", "decode_steps")
_REJECTED_BELOW = 500


def measure(finished: FinishedRequest) -> None:
    """Count the request and record how long what took."""
    model = {"gen_ai.request.model": finished.model}
    labels = model | {
        "gen_ai.operation.name": finished.operation,
        "gen_ai.provider.name": "pdmesh",
    }
    error_label = {"error.type": finished.error} if finished.error is not None else {}
    metrics.REQUEST_DURATION.record(finished.total_ms / 1000, labels | error_label)
    outcome = {"outcome": _outcome(finished.status)}
    metrics.REQUESTS.add(1, outcome | model | error_label)
    for name, duration_ms in finished.named_stages_ms.items():
        metrics.STAGE_DURATION.record(duration_ms / 1000, {"stage": name})
    if finished.ttft_ms is not None:
        metrics.TIME_TO_FIRST_TOKEN.record(finished.ttft_ms / 1000, labels)
    if finished.tpot_ms is not None:
        metrics.TIME_PER_OUTPUT_TOKEN.record(finished.tpot_ms / 1000, labels)
    for reason in finished.finish_reasons:
        metrics.FINISHED_CHOICES.add(1, {"reason": reason, **model})
    # The prompt of one that was refused, or left before its first token, does not count.
    if finished.num_choices and (finished.status == OK or finished.ttft_ms is not None):
        _measure_served(finished, model)


def _measure_served(finished: FinishedRequest, model: dict[str, str]) -> None:
    """What only a request with an answer has."""
    for kind, amount in (
        ("prompt", finished.prompt_tokens),
        ("completion", finished.completion_tokens),
        ("cached", finished.cached_tokens or 0),
    ):
        metrics.TOKENS.add(amount, {"type": kind, **model})
    num_computed = finished.prompt_tokens - (finished.cached_tokens or 0)
    metrics.PROMPT_LENGTH.record(finished.prompt_tokens, model)
    metrics.COMPUTED_PROMPT_LENGTH.record(num_computed, model)
    metrics.COMPLETION_LENGTH.record(finished.completion_tokens, model)
    metrics.LONGEST_COMPLETION.record(finished.longest_completion_tokens, model)
    metrics.MAX_TOKENS.record(finished.max_tokens, model)
    metrics.NUM_CHOICES.record(finished.num_choices, model)
    stages_ms = finished.named_stages_ms
    if inference_ms := sum(stages_ms.get(name, 0.0) for name in _INFERENCE):
        metrics.INFERENCE_DURATION.record(inference_ms / 1000, model)


def _outcome(status: int) -> str:
    if status == OK:
        return "ok"
    if status == CLIENT_CLOSED_REQUEST:
        return "aborted"
    return "rejected" if status < _REJECTED_BELOW else "error"
