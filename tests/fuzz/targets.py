"""What must hold for any body and any stream: nothing escapes, and all readers agree."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import orjson
from openai._streaming import SSEDecoder

from gateway import sse
from gateway.body import parse_object
from gateway.generation import GenerationRequest
from gateway.jobs import check_request
from gateway.openai.api import ApiRequest
from gateway.openai.chat import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.tokenize import parse_detokenize, parse_tokenize
from gateway.rules.engine import RuleRequest, actions_header, apply
from gateway.rules.loader import load
from gateway.rules.model import RuleSet
from gateway.rules.scanner import find_problem
from mesh.bench.sse import SseDecoder
from mesh.errors import InvalidRequest
from mesh.v1 import tokenizer_pb2

Result = TypeVar("Result")

MODEL = tokenizer_pb2.ModelInfo(
    name="smol", max_model_len=1000, vocab_size=257, eos_token_ids=[256], has_chat_template=True
)
RULE_SETS: list[RuleSet] = [
    load(path) for path in sorted((Path(__file__).parents[1] / "rules" / "rulesets").glob("*.yaml"))
]
_EXAMINED_BYTES = 256 * 1024


def check_body(body: bytes) -> None:
    """A body is refused in words, by both parsers, or goes through rules and validation."""
    payload = _unless_refused(lambda: parse_object(body))
    if payload is None:
        assert find_problem(body) is not None, "only one parser refuses it"
        return
    if len(body) <= _EXAMINED_BYTES:
        assert find_problem(body) is None
    _check_other_parser(body, payload)
    for rules in RULE_SETS:
        _check_rules(rules, body, payload)
    for parse in (ChatRequest.parse, CompletionRequest.parse):
        _check_validation(parse, payload)
    _unless_refused(lambda: parse_tokenize(payload))
    _unless_refused(lambda: parse_detokenize(payload))


def check_stream(payloads: Sequence[Any], cuts: Sequence[int]) -> None:
    """However the bytes are cut, every kind of client reads the same events."""
    stream = sse.KEEP_ALIVE.join([sse.event(payload) for payload in payloads] + [sse.DONE])
    parts = _cut(stream, cuts)
    expected = [json.loads(json.dumps(payload)) for payload in payloads]

    decoder = SseDecoder()
    ours = [event.data for part in parts for event in decoder.feed(part, 0.0)]
    assert [json.loads(data) for data in ours[:-1]] == expected
    assert ours[-1] == b"[DONE]"
    # What Python's splitlines takes for a line break is none of the format's.
    assert [json.loads(data) for data in _data(stream.decode().splitlines())[:-1]] == expected
    decoded = [event.data for event in SSEDecoder().iter_bytes(iter(parts))]
    assert [json.loads(data) for data in decoded[:-1]] == expected
    assert decoded[-1] == "[DONE]"


def _check_other_parser(body: bytes, payload: dict[str, Any]) -> None:
    try:
        other = orjson.loads(body)
    except orjson.JSONDecodeError:
        # It knows no integers beyond 64 bits.
        return
    if "e" not in body.decode().lower():
        assert other.keys() == payload.keys()


def _check_rules(rules: RuleSet, body: bytes, payload: dict[str, Any]) -> None:
    outcome = apply(rules, RuleRequest(body, payload, "/v1/chat/completions"))
    if not any(action for action in outcome.actions):
        assert outcome.body is body
        return
    actions_header(outcome.actions).encode("ascii")
    # What rules make of a body is one again.
    parse_object(outcome.body)


def _check_validation(
    parse: Callable[[dict[str, Any]], ApiRequest], payload: dict[str, Any]
) -> None:
    def run() -> GenerationRequest:
        request = parse(payload)
        generation = request.generation(MODEL)
        check_request(generation, MODEL, 128)
        return generation

    _unless_refused(run)


def _unless_refused(run: Callable[[], Result]) -> Result | None:
    """What `run` returns; None where it refuses in words that can go out as JSON."""
    try:
        return run()
    except InvalidRequest as error:
        refusal = [str(error), error.param]
    assert refusal[0]
    orjson.dumps(refusal)
    return None


def _cut(stream: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({cut % (len(stream) + 1) for cut in cuts} | {0, len(stream)})
    return [stream[start:end] for start, end in pairwise(places)]


def _data(lines: Sequence[str]) -> list[str]:
    """The data of each event, by the format's rules."""
    events: list[str] = []
    data: list[str] = []
    for line in lines:
        if not line and data:
            events.append("\n".join(data))
            data = []
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        else:
            assert not line or line.startswith(":"), line
    return events
