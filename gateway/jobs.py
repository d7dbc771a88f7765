"""From a request to its jobs: limits, windows, seeds."""

from collections.abc import Sequence

from gateway.generation import Deadline, GenerationRequest, Job, TokenPrompt
from gateway.sampling import check_sampling_params, check_stop, choice_seed
from mesh.errors import ContextLengthExceeded, InvalidRequest
from mesh.v1 import tokenizer_pb2, types_pb2

# About ten bytes each, far below what a message may weigh.
_MAX_PROMPT_LOGPROBS = 1_000_000


def check_request(
    request: GenerationRequest, model: tokenizer_pb2.ModelInfo, max_choices: int
) -> None:
    """Refuse what can be refused before anyone else is asked."""
    check_sampling_params(request.sampling_params, model)
    check_stop(request.stop)
    num_choices = request.n * len(request.prompts)
    if num_choices > max_choices:
        raise InvalidRequest(
            f"at most {max_choices} choices a request, not {num_choices}", param="n"
        )
    for prompt in request.prompts:
        if isinstance(prompt, TokenPrompt):
            max_new_tokens(request, len(prompt.token_ids), model)
            if max(prompt.token_ids) >= model.vocab_size:
                raise InvalidRequest(
                    f"the prompt holds a token id outside the vocabulary of {model.vocab_size}",
                    param=request.prompt_param,
                )


def make_jobs(
    request_id: str,
    request: GenerationRequest,
    model: tokenizer_pb2.ModelInfo,
    deadline: Deadline,
    prompt_index: int,
    prompt_token_ids: Sequence[int],
    bad_words: Sequence[types_pb2.TokenSequence],
) -> list[Job]:
    """One job for each choice of one prompt; refuses a prompt that leaves no room."""
    params = types_pb2.SamplingParams(
        max_tokens=max_new_tokens(request, len(prompt_token_ids), model), bad_words=bad_words
    )
    params.MergeFrom(request.sampling_params)
    check_sampling_params(params, model)
    _check_prompt_logprobs(params, len(prompt_token_ids))
    return [
        Job(
            request_id=f"{request_id}-{prompt_index * request.n + index}",
            model=model.name,
            prompt_token_ids=prompt_token_ids,
            sampling_params=_with_seed(params, index),
            end_token_ids=_end_token_ids(params, model),
            request=request,
            deadline=deadline,
        )
        for index in range(request.n)
    ]


def max_new_tokens(
    request: GenerationRequest, num_prompt_tokens: int, model: tokenizer_pb2.ModelInfo
) -> int:
    """How many tokens may follow the prompt; refused where the client wants more than fit."""
    window = model.max_model_len
    wanted = request.max_tokens or 0
    if num_prompt_tokens + max(wanted, 1) > window:
        asked = (
            f"you asked for {num_prompt_tokens + wanted} tokens ({num_prompt_tokens} in the "
            f"prompt, {wanted} for the completion)"
            if wanted
            else f"the prompt has {num_prompt_tokens} tokens"
        )
        raise ContextLengthExceeded(
            f"This model's maximum context length is {window} tokens, however {asked}.",
            param=request.prompt_param,
        )
    room = window - num_prompt_tokens
    return wanted or min(request.default_max_tokens or room, room)


def _check_prompt_logprobs(params: types_pb2.SamplingParams, num_prompt_tokens: int) -> None:
    """Refuse more log-probabilities than one message of a worker should hold."""
    if not params.HasField("num_prompt_logprobs"):
        return
    num_described = num_prompt_tokens * (params.num_prompt_logprobs + 1)
    if num_described > _MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"a prompt of {num_prompt_tokens} tokens with {params.num_prompt_logprobs} "
            f"alternatives each exceeds {_MAX_PROMPT_LOGPROBS} log-probabilities",
            param="logprobs",
        )


def _with_seed(params: types_pb2.SamplingParams, index: int) -> types_pb2.SamplingParams:
    seeded = types_pb2.SamplingParams()
    seeded.CopyFrom(params)
    seeded.seed = choice_seed(params.seed if params.HasField("seed") else None, index)
    return seeded


def _end_token_ids(
    params: types_pb2.SamplingParams, model: tokenizer_pb2.ModelInfo
) -> frozenset[int]:
    ends = set(params.stop_token_ids)
    if not params.ignore_eos:
        ends.update(model.eos_token_ids)
    return frozenset(ends)
