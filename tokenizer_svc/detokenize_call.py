"""The sequences of one Detokenize call: opened, appended to, over."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from opentelemetry import trace

from mesh.errors import InvalidRequest, MeshError, ModelNotFound
from mesh.telemetry import Span, Stopwatch, extract_trace, is_tracing, start_span, use_span
from mesh.v1 import tokenizer_pb2
from tokenizer_svc.detokenizer import make_detokenizer
from tokenizer_svc.models import TokenizerModel
from tokenizer_svc.quiescence import Quiescence
from tokenizer_svc.sequence_text import SequenceText, TextDelta
from tokenizer_svc.stop_strings import StopScanner, StopStrings
from tokenizer_svc.vocabulary import UnknownToken, Vocabulary

logger = logging.getLogger(__name__)

_MAX_SHARED_CHARS = 256


@dataclass(frozen=True)
class DetokenizeLimits:
    """What one call, and each of its sequences, may hold."""

    max_open_sequences: int = 4096
    max_stop_strings: int = 16
    max_stop_chars: int = 1024


@dataclass
class _OpenSequence:
    text: SequenceText
    vocabulary: Vocabulary
    return_token_bytes: bool
    span: Span
    duration_ms: float = 0.0


class DetokenizeCall:
    """All state of one call; nothing of it outlives `close`."""

    def __init__(
        self,
        models: Mapping[str, TokenizerModel],
        limits: DetokenizeLimits,
        quiescence: Quiescence,
    ) -> None:
        self._models = models
        self._limits = limits
        self._quiescence = quiescence
        self._sequences: dict[int, _OpenSequence] = {}

    def handle(
        self, request: tokenizer_pb2.DetokenizeRequest
    ) -> tokenizer_pb2.DetokenizeResponse | None:
        """One event; the answer to it where there is one. Never raises for one sequence."""
        sequence_id = request.sequence_id
        try:
            match request.WhichOneof("event"):
                case "open":
                    self._open(sequence_id, request.open)
                    return None
                case "append":
                    return self._append(sequence_id, request.append)
                case "close":
                    self._end(sequence_id)
                    return None
                case _:
                    raise InvalidRequest("no event is set")
        except (MeshError, UnknownToken) as error:
            return self._fail(sequence_id, str(error))
        except Exception:
            logger.exception("detokenization failed")
            return self._fail(sequence_id, "internal error")

    def close(self) -> None:
        """Drop every sequence that is still open."""
        for sequence_id in list(self._sequences):
            self._end(sequence_id)

    def _open(self, sequence_id: int, event: tokenizer_pb2.DetokenizeRequest.Open) -> None:
        if sequence_id in self._sequences:
            raise InvalidRequest("the sequence is already open")
        if len(self._sequences) >= self._limits.max_open_sequences:
            raise InvalidRequest(f"{len(self._sequences)} sequences are open already")
        model = self._models.get(event.model)
        if model is None:
            raise ModelNotFound(f"the model {event.model!r} does not exist")
        model.vocabulary.check(event.prompt_token_ids)
        stops = self._stop_strings(tuple(event.stop))
        detokenizer = make_detokenizer(
            model.vocabulary,
            event.prompt_token_ids,
            skip_special_tokens=event.skip_special_tokens,
        )
        scanner = None
        if stops is not None:
            scanner = StopScanner(stops, include_stop=event.include_stop_str_in_output)
        self._quiescence.begin()
        self._sequences[sequence_id] = _OpenSequence(
            text=SequenceText(detokenizer, scanner, min_tokens=event.min_tokens),
            vocabulary=model.vocabulary,
            return_token_bytes=event.return_token_bytes,
            span=_start_span(event.traceparent),
        )

    def _stop_strings(self, strings: tuple[str, ...]) -> StopStrings | None:
        if len(strings) > self._limits.max_stop_strings:
            raise InvalidRequest(
                f"at most {self._limits.max_stop_strings} stop strings are allowed"
            )
        if any(len(string) > self._limits.max_stop_chars for string in strings):
            raise InvalidRequest(
                f"a stop string has at most {self._limits.max_stop_chars} characters"
            )
        if "" in strings:
            raise InvalidRequest("a stop string must not be empty")
        return _automaton(strings) if strings else None

    def _append(
        self, sequence_id: int, event: tokenizer_pb2.DetokenizeRequest.Append
    ) -> tokenizer_pb2.DetokenizeResponse:
        stopwatch = Stopwatch()
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise InvalidRequest("the sequence is not open")
        sequence.vocabulary.check(event.token_ids)
        sequence.vocabulary.check(event.describe_token_ids)
        delta = sequence.text.append(
            event.token_ids,
            is_last=event.is_last,
            ends_with_stop_token=event.ends_with_stop_token,
        )
        described = event.describe_token_ids
        if not described and sequence.return_token_bytes:
            described = event.token_ids
        response = tokenizer_pb2.DetokenizeResponse(
            sequence_id=sequence_id,
            text=delta.text,
            matched_stop=delta.matched_stop,
            num_tokens=delta.num_tokens if delta.matched_stop is not None else 0,
            token_bytes=[sequence.vocabulary.token_bytes[token_id] for token_id in described],
            duration_ms=stopwatch.elapsed_ms,
        )
        sequence.duration_ms += response.duration_ms
        if event.is_last or delta.matched_stop is not None:
            # Before the answer leaves: the span lies inside the caller's.
            self._end(sequence_id, delta)
        return response

    def _fail(self, sequence_id: int, message: str) -> tokenizer_pb2.DetokenizeResponse:
        self._end(sequence_id)
        return tokenizer_pb2.DetokenizeResponse(sequence_id=sequence_id, error=message)

    def _end(self, sequence_id: int, last: TextDelta | None = None) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return
        self._quiescence.end()
        span = sequence.span
        span.set_attribute("pdmesh.num_tokens", sequence.text.num_tokens)
        span.set_attribute("pdmesh.busy_ms", sequence.duration_ms)
        span.set_attribute(
            "pdmesh.matched_stop", last is not None and last.matched_stop is not None
        )
        span.end()


def _start_span(traceparent: str) -> Span:
    """A span in the sequence's own trace; the call's belongs to nobody in particular."""
    if not is_tracing() or not traceparent:
        return trace.INVALID_SPAN
    context = extract_trace([("traceparent", traceparent)])
    if context is None:
        return trace.INVALID_SPAN
    with use_span(trace.get_current_span(context)):
        return start_span("tokenizer.detokenize")


@lru_cache(maxsize=64)
def _shared_automaton(strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(strings)


def _automaton(strings: tuple[str, ...]) -> StopStrings:
    # Most requests bring the same few short stop strings; only those are kept.
    if sum(map(len, strings)) <= _MAX_SHARED_CHARS:
        return _shared_automaton(strings)
    return StopStrings(strings)
