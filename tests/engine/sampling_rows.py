"""Rows of known logits, and what the sampler makes of them."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from engine.request import Request
from engine.sampling import NextToken, SampledToken, Sampler, SamplingParams

Row = npt.NDArray[np.float32]

VOCAB_SIZE = 8
EOS = frozenset({2, 0})
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
RANDOM = SamplingParams(max_tokens=100, temperature=1.0)


def make_request(
    params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None
) -> Request:
    return Request("r", prompt or [7], params, output_token_ids=output or [])


def sample(rows: list[list[float]], requests: list[Request]) -> list[SampledToken | None]:
    return Sampler(EOS).sample(np.array(rows, dtype=np.float32), list(map(NextToken.of, requests)))


def sample_one(row: list[float], request: Request) -> SampledToken:
    [token] = sample([row], [request])
    assert token is not None
    return token


def logprobs_of(row: list[float], request: Request) -> dict[int, float]:
    """What the sampler made of a row, seen through log-probabilities of the whole vocabulary."""
    params = replace(request.sampling_params, num_logprobs=len(row))
    token = sample_one(row, replace_params(request, params))
    assert token.logprobs is not None
    return {candidate.token_id: candidate.logprob for candidate in token.logprobs.top}


def replace_params(request: Request, params: SamplingParams) -> Request:
    return make_request(params, request.prompt_token_ids, request.output_token_ids)


def shaped(row: list[float], request: Request) -> dict[int, float]:
    """Logits after bias, penalties and masks, relative to token 7's, which is left alone."""
    logprobs = logprobs_of(row, request)
    return {token_id: logprob - logprobs[7] for token_id, logprob in logprobs.items()}
