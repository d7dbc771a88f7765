"""The life of one request: tokenize, place, prefill, decode, text."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from gateway.attempts import AttemptLimits, Attempts
from gateway.detokenize import Detokenizer
from gateway.generation import (
    Chunk,
    Deadline,
    Delta,
    GenerationRequest,
    Job,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from gateway.jobs import check_request, make_jobs
from gateway.placement import HeldPlacement, Scheduler
from gateway.timeline import Timeline
from gateway.token_source import Workers
from gateway.tokenizer import Tokenizer
from gateway.tracing import attempt_span
from mesh.errors import InvalidRequest, MeshError
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
        attempt_limits: AttemptLimits,
    ) -> None:
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._workers = workers
        self._detokenizer = detokenizer
        self._max_choices = max_choices
        self._attempt_limits = attempt_limits

    async def prepare(
        self,
        request_id: str,
        request: GenerationRequest,
        model: tokenizer_pb2.ModelInfo,
        deadline: Deadline,
        timeline: Timeline,
    ) -> list[list[Job]]:
        """Validate and encode: for each prompt one job a choice. Asks no worker."""
        check_request(request, model, self._max_choices)
        groups: list[list[Job]] = []
        for index, prompt in enumerate(request.prompts):
            timeline.enter(types_pb2.STAGE_TOKENIZE)
            token_ids, bad_words = await self._encode(prompt, request, model, deadline, timeline)
            text = await self._echoed(prompt, model, deadline) if request.echo else ""
            timeline.enter(types_pb2.STAGE_RULES)
            jobs = make_jobs(request_id, request, model, deadline, index, token_ids, bad_words)
            for job in jobs:
                job.prompt_text = text
            groups.append(jobs)
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
        attempts = Attempts(job, self._attempt_limits)
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
        async with (
            attempt_span(job),
            self._scheduler.place(job, attempts.excluded_worker_ids) as placement,
        ):
            job.trace.mode = placement.mode
            job.trace.decode_worker_id = placement.decode.worker_id
            try:
                async with aclosing(self._run(job, placement, attempts)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except MeshError as error:
                assert attempts.worker is not None, "only calls to workers fail here"
                await placement.failed(attempts.worker.worker_id, error)
                raise

    async def _run(
        self, job: Job, placement: HeldPlacement, attempts: Attempts
    ) -> AsyncGenerator[Chunk, None]:
        """Prefill and decode on the workers of one placement."""
        if placement.prefill is None:
            attempts.worker = placement.decode
            decoding = self._workers.decode(job, placement.decode)
            async with aclosing(placement.observed(job, decoding)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return

        attempts.worker = placement.prefill
        job.trace.prefill_worker_id = placement.prefill.worker_id
        async with self._workers.prefill(job, placement.prefill, placement.decode) as first:
            yield first.chunk
            if first.chunk.finish is not None:
                return
            await placement.prefill_done(job)
            attempts.worker = placement.decode
            decoding = self._workers.decode(job, placement.decode, first)
            async with aclosing(placement.observed(job, decoding)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _echoed(
        self, prompt: Prompt, model: tokenizer_pb2.ModelInfo, deadline: Deadline
    ) -> str:
        match prompt:
            case TextPrompt(text):
                return text
            case TokenPrompt(token_ids):
                return (await self._tokenizer.decode(model.name, token_ids, deadline)).text
            case _:
                raise InvalidRequest("a chat has no text to echo", param="echo")

    async def _encode(
        self,
        prompt: Prompt,
        request: GenerationRequest,
        model: tokenizer_pb2.ModelInfo,
        deadline: Deadline,
        timeline: Timeline,
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
            timeline.reported(encoded.timings)
            return encoded.token_ids, encoded.bad_words
        if not request.bad_words:
            return prompt.token_ids, ()
        # The prompt is encoded already; only the words are not.
        text = TextPrompt(request.bad_words[0])
        encoded = await self._tokenizer.encode(model.name, text, deadline, request.bad_words)
        timeline.reported(encoded.timings)
        return prompt.token_ids, encoded.bad_words
