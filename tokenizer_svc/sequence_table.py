"""The open sequences of one Detokenize call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import trace

from mesh.errors import InvalidRequest, ModelNotFound
from mesh.telemetry import Span, Stopwatch, extract_trace, is_tracing, start_span, use_span
from mesh.text.sequence_text import SequenceText, TextDelta
from mesh.text.stop_strings import StopScanner
from tokenizer_svc.detokenizer import make_detokenizer
from tokenizer_svc.models import TokenizerModel
from tokenizer_svc.quiescence import Quiescence
from tokenizer_svc.vocabulary import Vocabulary


@dataclass(frozen=True)
class SequenceLimits:
    """What one call, and each of its sequences, may hold."""

    max_open_sequences: int = 4096
    max_stop_strings: int = 16
    max_stop_chars: int = 1024


@dataclass(frozen=True)
class SequenceOptions:
    """How a sequence becomes text."""

    model: str
    prompt_token_ids: Sequence[int] = ()
    skip_special_tokens: bool = False
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    return_token_bytes: bool = False
    traceparent: str = ""


@dataclass(frozen=True)
class Tokens:
    """The next tokens of a sequence."""

    token_ids: Sequence[int]
    is_last: bool = False
    ends_with_stop_token: bool = False
    describe_token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Appended:
    """What some tokens made final, and the bytes that were asked for."""

    delta: TextDelta
    token_bytes: list[bytes]
    duration_ms: float


@dataclass
class _OpenSequence:
    text: SequenceText
    vocabulary: Vocabulary
    return_token_bytes: bool
    span: Span
    duration_ms: float = 0.0


class SequenceTable:
    """All state of one call; nothing of it outlives `close`."""

    def __init__(
        self,
        models: Mapping[str, TokenizerModel],
        limits: SequenceLimits,
        quiescence: Quiescence,
    ) -> None:
        self._models = models
        self._limits = limits
        self._quiescence = quiescence
        self._sequences: dict[int, _OpenSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def open(self, sequence_id: int, options: SequenceOptions) -> None:
        """Begin a sequence.

        Raises:
            InvalidRequest, ModelNotFound, UnknownToken: nothing was opened.
        """
        if sequence_id in self._sequences:
            raise InvalidRequest("the sequence is already open")
        if len(self._sequences) >= self._limits.max_open_sequences:
            raise InvalidRequest(f"{len(self._sequences)} sequences are open already")
        model = self._models.get(options.model)
        if model is None:
            raise ModelNotFound(f"the model {options.model!r} does not exist")
        model.vocabulary.check(options.prompt_token_ids)
        scanner = self._scanner(options)
        detokenizer = make_detokenizer(
            model.vocabulary,
            options.prompt_token_ids,
            skip_special_tokens=options.skip_special_tokens,
        )
        self._quiescence.begin()
        self._sequences[sequence_id] = _OpenSequence(
            text=SequenceText(detokenizer, scanner, min_tokens=options.min_tokens),
            vocabulary=model.vocabulary,
            return_token_bytes=options.return_token_bytes,
            span=_start_span(options.traceparent),
        )

    def append(self, sequence_id: int, tokens: Tokens) -> Appended:
        """Take a sequence's next tokens; it is over after a match or the last ones.

        Raises:
            InvalidRequest, UnknownToken: the caller must `end` the sequence.
        """
        stopwatch = Stopwatch()
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise InvalidRequest("the sequence is not open")
        sequence.vocabulary.check(tokens.token_ids)
        sequence.vocabulary.check(tokens.describe_token_ids)
        delta = sequence.text.append(
            tokens.token_ids,
            is_last=tokens.is_last,
            ends_with_stop_token=tokens.ends_with_stop_token,
        )
        described = tokens.describe_token_ids
        if not described and sequence.return_token_bytes:
            described = tokens.token_ids
        token_bytes = [sequence.vocabulary.token_bytes[token_id] for token_id in described]
        duration_ms = stopwatch.elapsed_ms
        sequence.duration_ms += duration_ms
        if tokens.is_last or delta.matched_stop is not None:
            # Before the answer leaves, so that the span lies inside the caller's.
            sequence.span.set_attribute("pdmesh.matched_stop", delta.matched_stop is not None)
            self.end(sequence_id)
        return Appended(delta, token_bytes, duration_ms)

    def end(self, sequence_id: int) -> None:
        """Free a sequence; one that is not open is no mistake."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._quiescence.end()
            sequence.span.set_attribute("pdmesh.num_tokens", sequence.text.num_tokens)
            sequence.span.set_attribute("pdmesh.busy_ms", sequence.duration_ms)
            sequence.span.end()

    def close(self) -> None:
        """Free every sequence that is still open."""
        for sequence_id in list(self._sequences):
            self.end(sequence_id)

    def _scanner(self, options: SequenceOptions) -> StopScanner | None:
        limits = self._limits
        if len(options.stop) > limits.max_stop_strings:
            raise InvalidRequest(f"at most {limits.max_stop_strings} stop strings are allowed")
        if any(len(string) > limits.max_stop_chars for string in options.stop):
            raise InvalidRequest(f"a stop string has at most {limits.max_stop_chars} characters")
        if "" in options.stop:
            raise InvalidRequest("a stop string must not be empty")
        return StopScanner.of(options.stop, include_stop=options.include_stop_str_in_output)


def _start_span(traceparent: str) -> Span:
    """A span in the sequence's own trace; the call's belongs to nobody in particular."""
    if not is_tracing() or not traceparent:
        return trace.INVALID_SPAN
    context = extract_trace([("traceparent", traceparent)])
    if context is None:
        return trace.INVALID_SPAN
    with use_span(trace.get_current_span(context)):
        return start_span("tokenizer.detokenize")
