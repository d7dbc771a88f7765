"""What the model thought of a prompt: log-probabilities of the tokens that it was given."""

import numpy as np
import numpy.typing as npt

from engine.batcher import Batch, ScheduledRequest
from engine.sampling import logprobs_of

Logits = npt.NDArray[np.float32]


def score_prompts(batch: Batch, logits: Logits) -> Logits:
    """Keep with each request what was asked about its prompt; return the rows to sample from."""
    if not any(item.request.scores_prompt for item in batch.scheduled):
        return logits
    sampled: list[int] = []
    end = 0
    for item in batch.scheduled:
        begin, end = end, end + item.num_logits
        if item.request.scores_prompt:
            _score(item, logits[begin:end])
        sampled += range(end - item.num_sampled, end)
    return logits[sampled]


def _score(item: ScheduledRequest, logits: Logits) -> None:
    request, first = item.request, item.request.num_computed_tokens
    # A preempted request comes here again with tokens that it had computed before.
    del request.prompt_logprobs[first:]
    followers = request.prompt_token_ids[first + 1 : first + 1 + item.num_tokens]
    # The last row of the prompt has no follower yet.
    for row, token_id in zip(logits, followers, strict=False):
        logprobs = logprobs_of(token_id, row, request.sampling_params.num_prompt_logprobs)
        assert logprobs is not None, "asked for"
        request.prompt_logprobs.append(logprobs)
