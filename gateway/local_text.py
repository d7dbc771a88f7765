"""Token ids to text in the gateway itself, where each token is a run of bytes."""

from collections.abc import Sequence

from gateway.generation import Chunk, Job
from gateway.text_sequence import NewText, TextSequence
from mesh.errors import InternalError
from mesh.telemetry import INVALID_SPAN, Span, Stopwatch, start_span
from mesh.text.detokenizer import BytesDetokenizer
from mesh.text.sequence_text import SequenceText
from mesh.text.stop_strings import StopScanner
from mesh.text.token_bytes import TokenBytes, UnknownToken


class LocalText(TextSequence):
    """A table and a UTF-8 decoder: less work than asking the tokenizer for the same."""

    def __init__(self, job: Job, tokens: TokenBytes) -> None:
        super().__init__(job)
        request = job.request
        self._tokens = tokens
        self._text = SequenceText(
            BytesDetokenizer(
                tokens.table,
                self.context,
                tokens.special_ids if request.skip_special_tokens else frozenset(),
            ),
            StopScanner.of(request.stop, include_stop=request.include_stop_str_in_output),
            min_tokens=job.sampling_params.min_tokens,
        )
        self._busy_ms = 0.0
        # Until the first token: what it waits for has spans of its own.
        self._span: Span = INVALID_SPAN

    async def to_text(self, chunk: Chunk, described_ids: Sequence[int]) -> NewText:
        if self._span is INVALID_SPAN:
            self._span = start_span("tokenizer.detokenize")
        stopwatch = Stopwatch()
        try:
            self._tokens.check(chunk.token_ids)
            self._tokens.check(described_ids)
        except UnknownToken as error:
            raise InternalError(f"detokenization failed: {error}") from error
        finish = chunk.finish
        delta = self._text.append(
            chunk.token_ids,
            is_last=finish is not None,
            ends_with_stop_token=finish is not None and finish.stop_token_id is not None,
        )
        self._busy_ms += stopwatch.elapsed_ms
        self._span.set_attribute("pdmesh.matched_stop", delta.matched_stop is not None)
        table = self._tokens.table
        token_bytes = [table[token_id] for token_id in described_ids]
        return NewText(delta.text, delta.matched_stop, delta.num_tokens, token_bytes)

    def close(self) -> None:
        self._span.set_attribute("pdmesh.num_tokens", self._text.num_tokens)
        self._span.set_attribute("pdmesh.busy_ms", self._busy_ms)
        self._span.end()
