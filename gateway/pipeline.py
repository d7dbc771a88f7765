"""The life of one request: tokenize, place, prefill, decode, text."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from gateway.detokenize import Detokenizer
from gateway.generation import (
    Chunk,
    Deadline,
    Delta,
    GenerationRequest,
    Job,
    JobTrace,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from gateway.placement import Scheduler
from gateway.sampling import check_sampling_params, check_stop, choice_seed
from gateway.token_source import Attempts, Workers
from gateway.tokenizer import Tokenizer
from mesh.errors import ContextLengthExceeded, InvalidRequest, MeshError
from mesh.telemetry import Stopwatch
from mesh.v1 import tokenizer_pb2, types_pb2


class Pipeline:
    """Takes a request through the mesh. What it takes on the way it gives back."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        workers: Workers,
        detokenizer: Detokenizer,
        *,
        max_choices: int,
        max_attempts: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._workers = workers
        self._detokenizer = detokenizer
        self._max_choices = max_choices
        self._max_attempts = max_attempts

    async def prepare(
        self,
        request_id: str,
        request: GenerationRequest,
        model: tokenizer_pb2.ModelInfo,
        deadline: Deadline,
    ) -> list[list[Job]]:
        """Validate and encode: for each prompt one job a choice. Asks no worker."""
        self._check(request, model)
        groups: list[list[Job]] = []
        for prompt_index, prompt in enumerate(request.prompts):
            stopwatch = Stopwatch()
            token_ids, bad_words = await self._encode(prompt, request, model, deadline)
            tokenize_ms = stopwatch.elapsed_ms
            max_tokens = _max_tokens(request, len(token_ids), model)
            params = types_pb2.SamplingParams(max_tokens=max_tokens, bad_words=bad_words)
            params.MergeFrom(request.sampling_params)
            check_sampling_params(params, model)
            groups.append(
                [
                    Job(
                        request_id=f"{request_id}-{prompt_index * request.n + index}",
                        model=model.name,
                        prompt_token_ids=token_ids,
                        sampling_params=_with_seed(params, index),
                        end_token_ids=_end_token_ids(params, model),
                        request=request,
                        deadline=deadline,
                        trace=JobTrace({types_pb2.STAGE_TOKENIZE: tokenize_ms}),
                    )
                    for index in range(request.n)
                ]
            )
        return groups

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        """One choice; the last delta says why it ended. Closing it stops all work."""
        async with self._detokenizer.open(job) as text, aclosing(self._tokens(job)) as chunks:
            async for chunk in chunks:
                delta = await text.append(chunk)
                yield delta
                if delta.finish is not None:
                    # A stop string ends the text before the worker knows: leaving tells it.
                    return

    async def _tokens(self, job: Job) -> AsyncGenerator[Chunk, None]:
        """Every token exactly once, on as many workers as it takes."""
        attempts = Attempts(job, self._max_attempts)
        while True:
            try:
                async with aclosing(self._attempt(job, attempts)) as chunks:
                    async for chunk in chunks:
                        job.record(chunk)
                        yield chunk
                return
            except MeshError as error:
                await attempts.after(error)

    async def _attempt(self, job: Job, attempts: Attempts) -> AsyncGenerator[Chunk, None]:
        """Go on after the tokens that exist, on one placement."""
        async with self._scheduler.place(job, attempts.excluded_worker_ids) as placement:
            job.trace.mode = placement.mode
            job.trace.decode_worker_id = placement.decode.worker_id
            if placement.prefill is None:
                attempts.worker_id = placement.decode.worker_id
                async with aclosing(self._workers.decode(job, placement.decode)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return

            job.trace.prefill_worker_id = attempts.worker_id = placement.prefill.worker_id
            async with self._workers.prefill(job, placement.prefill) as first:
                yield first.chunk
                if first.chunk.finish is not None:
                    return
                await placement.prefill_done()
                attempts.worker_id = placement.decode.worker_id
                async with aclosing(self._workers.decode(job, placement.decode, first)) as chunks:
                    async for chunk in chunks:
                        yield chunk

    async def _encode(
        self,
        prompt: Prompt,
        request: GenerationRequest,
        model: tokenizer_pb2.ModelInfo,
        deadline: Deadline,
    ) -> tuple[Sequence[int], Sequence[types_pb2.TokenSequence]]:
        if not isinstance(prompt, TokenPrompt):
            try:
                encoded = await self._tokenizer.encode(
                    model.name, prompt, deadline, request.bad_words
                )
            except InvalidRequest as error:
                # The tokenizer does not know what the client calls its prompt.
                error.param = error.param or request.prompt_param
                raise
            return encoded.token_ids, encoded.bad_words
        if not all(token_id < model.vocab_size for token_id in prompt.token_ids):
            raise InvalidRequest(
                f"prompt holds a token id outside the vocabulary of {model.vocab_size}",
                param=request.prompt_param,
            )
        if not request.bad_words:
            return prompt.token_ids, ()
        # The prompt is encoded already; only the words are not.
        text = TextPrompt(request.bad_words[0])
        encoded = await self._tokenizer.encode(model.name, text, deadline, request.bad_words)
        return prompt.token_ids, encoded.bad_words

    def _check(self, request: GenerationRequest, model: tokenizer_pb2.ModelInfo) -> None:
        """What can be refused before anyone else is asked."""
        check_sampling_params(request.sampling_params, model)
        check_stop(request.stop)
        num_choices = request.n * len(request.prompts)
        if num_choices > self._max_choices:
            raise InvalidRequest(
                f"at most {self._max_choices} choices a request, not {num_choices}", param="n"
            )
        for prompt in request.prompts:
            if isinstance(prompt, TokenPrompt):
                _max_tokens(request, len(prompt.token_ids), model)


def _max_tokens(
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
