"""Ranges of the sampling parameters, for every API of the gateway."""

import hashlib
import secrets

from mesh.errors import InvalidRequest
from mesh.v1 import tokenizer_pb2, types_pb2

MAX_STOP_STRINGS = 16
# Each choice follows them through an automaton with a state a character.
MAX_STOP_CHARS = 1024
# Each choice's calls to workers carry them.
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1

# Both ends belong to the range.
RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_MAX_BIAS = 100.0


def check_sampling_params(params: types_pb2.SamplingParams, model: tokenizer_pb2.ModelInfo) -> None:
    """Refuse what is out of range, naming the parameter."""
    for name, (low, high) in RANGES.items():
        # NaN lies in no range.
        if params.HasField(name) and not low <= getattr(params, name) <= high:  # type: ignore[arg-type]
            raise InvalidRequest(f"{name} should lie between {low:g} and {high:g}", param=name)
    if params.HasField("repetition_penalty") and not 0.0 < params.repetition_penalty <= 2.0:
        raise InvalidRequest(
            "repetition_penalty should be above 0 and at most 2", param="repetition_penalty"
        )
    if params.HasField("top_k") and params.top_k < -1:
        raise InvalidRequest("top_k should be -1, 0 or more", param="top_k")
    for name in ("num_logprobs", "num_prompt_logprobs"):
        if getattr(params, name) > MAX_LOGPROBS:
            raise InvalidRequest(f"at most {MAX_LOGPROBS} log-probabilities", param=name)
    if params.max_tokens and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens ({params.min_tokens}) exceeds max_tokens ({params.max_tokens})",
            param="min_tokens",
        )
    for token_id, bias in params.logit_bias.items():
        _check_token_id(token_id, model, "logit_bias")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise InvalidRequest(
                "logit_bias values should lie between -100 and 100", param="logit_bias"
            )
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids", param="stop_token_ids")
    for token_id in params.stop_token_ids:
        _check_token_id(token_id, model, "stop_token_ids")


def check_stop(stop: tuple[str, ...]) -> None:
    """Refuse stop strings that could match everywhere, and more of them than can be afforded."""
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings", param="stop")
    if "" in stop:
        raise InvalidRequest("a stop string should not be empty", param="stop")
    if any(len(one) > MAX_STOP_CHARS for one in stop):
        raise InvalidRequest(
            f"a stop string may have at most {MAX_STOP_CHARS} characters", param="stop"
        )


def choice_seed(seed: int | None, index: int) -> int:
    """The seed of choice `index`; drawn here where the client gave none.

    Workers never draw one, so that a choice goes on unchanged on another worker.
    """
    if seed is None:
        return secrets.randbits(63)
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _check_token_id(token_id: int, model: tokenizer_pb2.ModelInfo, param: str) -> None:
    if token_id >= model.vocab_size:
        raise InvalidRequest(
            f"token id {token_id} is outside the vocabulary of {model.vocab_size}", param=param
        )
