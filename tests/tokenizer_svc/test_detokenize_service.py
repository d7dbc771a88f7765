"""TokenizerService over the wire: the tokens of many sequences on one call."""

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from mesh.client import mesh_errors
from mesh.errors import InternalError
from tests.tokenizer_svc.served import EndedSpans, Request, Response, Sequences, Stub, ids, serving
from tokenizer_svc.models import TokenizerModel
from tokenizer_svc.sequence_table import SequenceTable

TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


async def test_one_call_serves_many_sequences_in_turn(stub: Stub) -> None:
    sequences = Sequences(stub)
    texts = {i: f"{i}: 🌶 é {'x' * i}" for i in range(50)}
    for i in texts:
        await sequences.open(i)
    received = dict.fromkeys(texts, "")
    left = {i: ids(text) for i, text in texts.items()}
    choose = random.Random(2)

    while left:
        i = choose.choice(list(left))
        size = choose.randint(1, 5)
        group, left[i] = left[i][:size], left[i][size:]
        response = await sequences.append(i, group, is_last=not left[i])
        received[i] += response.text
        if not left[i]:
            del left[i]

    assert received == texts
    await sequences.finish()


async def test_answers_keep_the_order_of_appends_sent_ahead(stub: Stub) -> None:
    sequences = Sequences(stub)
    await sequences.open(1)
    await sequences.open(2)
    for i in range(20):
        await sequences.send(1 + i % 2, ids(chr(ord("a") + i)))

    answers = [await sequences.answer() for _ in range(20)]

    assert [answer.sequence_id for answer in answers] == [1, 2] * 10
    assert "".join(answer.text for answer in answers) == "abcdefghijklmnopqrst"
    assert all(answer.duration_ms >= 0 for answer in answers)
    await sequences.finish()


async def test_events_of_one_message_are_answered_in_one_and_fail_alone(stub: Stub) -> None:
    call = stub.Detokenize()
    opens = [Request(sequence_id=i, open=Request.Open(model="bytes")) for i in (1, 2)]
    appends = [
        Request(sequence_id=i, append=Request.Append(token_ids=ids(text)))
        for i, text in ((1, "one"), (3, "nobody opened"), (2, "two"), (1, "more"))
    ]
    opens[0].more.extend([*opens[1:], *appends])

    await call.write(opens[0])
    response = await call.read()

    assert isinstance(response, Response)
    answers = [response, *response.more]
    assert [(answer.sequence_id, answer.text) for answer in answers] == [
        (1, "one"),
        (3, ""),
        (2, "two"),
        (1, "more"),
    ]
    assert [bool(answer.error) for answer in answers] == [False, True, False, False]
    call.cancel()


# TK-13, TK-17
async def test_a_stop_string_ends_the_sequence_and_counts_its_tokens(stub: Stub) -> None:
    sequences = Sequences(stub)
    await sequences.open(7, stop=["two"])

    first = await sequences.append(7, ids("one t"))
    second = await sequences.append(7, ids("wo three"))
    third = await sequences.append(7, ids("x"))

    assert (first.text, first.HasField("matched_stop"), first.num_tokens) == ("one ", False, 0)
    assert (second.text, second.matched_stop, second.num_tokens) == ("", "two", 7)
    assert third.error == "the sequence is not open"
    await sequences.open(7)  # its number is free again
    assert (await sequences.append(7, ids("x"))).text == "x"
    await sequences.finish()


# TK-14
async def test_held_text_comes_with_the_last_append_even_an_empty_one(stub: Stub) -> None:
    sequences = Sequences(stub)
    await sequences.open(1, stop=["<|end|>"])

    assert (await sequences.append(1, ids("x<|"))).text == "x"
    assert (await sequences.append(1, [], is_last=True)).text == "<|"
    await sequences.finish()


async def test_options_of_a_sequence_are_passed_on(stub: Stub) -> None:
    sequences = Sequences(stub)
    await sequences.open(1, stop=["b"], include_stop_str_in_output=True, min_tokens=3)
    await sequences.open(2, skip_special_tokens=True)
    await sequences.open(3, prompt_token_ids=ids("Hello 🌶")[:-1])

    included = await sequences.append(1, ids("abab"))
    skipped = await sequences.append(2, [256, *ids("a"), 257], ends_with_stop_token=True)
    continued = await sequences.append(3, ids("🌶")[-1:])

    assert (included.text, included.num_tokens) == ("abab", 4)
    assert skipped.text == "a"
    assert continued.text == "🌶"
    await sequences.finish()


async def test_token_bytes_come_for_described_or_for_appended_tokens(stub: Stub) -> None:
    sequences = Sequences(stub)
    await sequences.open(1, return_token_bytes=True)
    await sequences.open(2)

    described = await sequences.append(1, ids("a"), describe_token_ids=[*ids("é"), 257])
    appended = await sequences.append(1, ids("é"))
    silent = await sequences.append(2, ids("é"))

    assert list(described.token_bytes) == [b"\xc3", b"\xa9", b"<|im_end|>"]
    assert list(appended.token_bytes) == [b"\xc3", b"\xa9"]
    assert list(silent.token_bytes) == []
    await sequences.finish()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "nope"}, "the model 'nope' does not exist"),
        ({"prompt_token_ids": [999]}, "token id 999 is outside the vocabulary of 258"),
        ({"stop": ["a"] * 17}, "at most 16 stop strings are allowed"),
        ({"stop": ["a", ""]}, "a stop string must not be empty"),
        ({"stop": ["a" * 1025]}, "a stop string has at most 1024 characters"),
    ],
)
async def test_a_sequence_that_cannot_be_opened_fails_alone(
    stub: Stub, options: dict[str, Any], error: str
) -> None:
    sequences = Sequences(stub)
    await sequences.open(1)

    await sequences.open(2, **options)
    failed = await sequences.answer()

    assert (failed.sequence_id, failed.error) == (2, error)
    assert (await sequences.append(1, ids("fine"))).text == "fine"
    await sequences.finish()


async def test_a_fault_in_one_sequence_leaves_the_others_alone(stub: Stub) -> None:
    sequences = Sequences(stub)
    await sequences.open(1)
    await sequences.open(2)

    unknown_id = await sequences.append(1, [999])
    after = await sequences.append(1, ids("x"))
    never_opened = await sequences.append(3, ids("x"))
    other = await sequences.append(2, ids("fine"))

    assert "999" in unknown_id.error
    assert after.error == never_opened.error == "the sequence is not open"
    assert other.text == "fine"
    await sequences.finish()


async def test_a_number_that_is_in_use_cannot_be_opened_again(stub: Stub) -> None:
    sequences = Sequences(stub)
    await sequences.open(1)
    await sequences.open(1)

    assert (await sequences.answer()).error == "the sequence is already open"
    await sequences.finish()


async def test_a_call_holds_only_so_many_sequences_and_closed_ones_do_not_count(
    bytes_model: TokenizerModel,
) -> None:
    async with serving([bytes_model], max_open_sequences=2) as (stub, _):
        sequences = Sequences(stub)
        for i in (1, 2, 3):
            await sequences.open(i)
        refused = await sequences.answer()
        await sequences.close(1)
        await sequences.open(4)

        assert (refused.sequence_id, refused.error) == (3, "2 sequences are open already")
        assert (await sequences.append(4, ids("x"))).text == "x"
        await sequences.finish()


async def test_a_caller_that_does_not_read_is_not_read_from(
    stub: Stub, smollm2: TokenizerModel, spans: EndedSpans
) -> None:
    sequences = Sequences(stub)
    dashes = smollm2.vocabulary.token_bytes.index(b"-" * 64)

    async def send_all() -> None:
        for i in range(1000):
            await sequences.open(i, model="smollm2", traceparent=TRACEPARENT)
            await sequences.send(i, [dashes] * 1000, is_last=True)

    sending = asyncio.create_task(send_all())
    num_answered = await count_until_quiet(spans)

    assert 0 < num_answered < 500
    for i in range(1000):
        answer = await sequences.answer()
        assert (answer.sequence_id, len(answer.text)) == (i, 64_000)
    await sending
    await sequences.finish()


async def count_until_quiet(spans: EndedSpans) -> int:
    """How many spans end before there is no progress for a while."""
    for count in itertools.count():
        try:
            await asyncio.wait_for(spans.queue.get(), timeout=1)
        except TimeoutError:
            return count
    raise AssertionError("unreachable")


async def test_draining_waits_for_open_sequences_only(bytes_model: TokenizerModel) -> None:
    async with serving([bytes_model]) as (stub, servicer):
        sequences = Sequences(stub)
        await sequences.open(1)
        await sequences.append(1, ids("x"))
        draining = asyncio.create_task(servicer.drain())
        await asyncio.sleep(0)
        assert not draining.done()

        await sequences.append(1, ids("y"), is_last=True)

        await asyncio.wait_for(draining, 20)
        await sequences.open(2)
        await sequences.append(2, ids("x"))
        draining = asyncio.create_task(servicer.drain())
        sequences.cancel()  # frees what is open
        await asyncio.wait_for(draining, 20)


async def test_each_sequence_is_a_span_in_its_own_trace_that_ends_before_its_last_answer(
    stub: Stub, spans: EndedSpans
) -> None:
    sequences = Sequences(stub)
    await sequences.open(1, traceparent=TRACEPARENT, stop=["b"])
    await sequences.open(2, traceparent="garbage")
    await sequences.open(3)

    await sequences.append(1, ids("a"))
    assert spans.queue.empty()
    await sequences.append(1, ids("b"))
    for i in (2, 3):
        await sequences.append(i, ids("a"), is_last=True)

    span = spans.queue.get_nowait()
    assert spans.queue.empty()
    assert span.name == "tokenizer.detokenize"
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" in TRACEPARENT
    assert span.attributes is not None
    assert span.attributes["pdmesh.num_tokens"] == 2
    await sequences.finish()


# OB-01
async def test_sequences_that_are_abandoned_end_their_spans_quietly(
    stub: Stub, spans: EndedSpans, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(30):
        sequences = Sequences(stub)
        await sequences.open(1, traceparent=TRACEPARENT)
        await sequences.append(1, ids("a"))
        sequences.cancel()

    async with asyncio.timeout(20):
        for _ in range(30):
            assert (await spans.queue.get()).name == "tokenizer.detokenize"

    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_stray_cancellation_within_the_call_ends_it_as_internal(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GR-04
    sequences = Sequences(stub)
    await sequences.open(1)
    await sequences.append(1, ids("a"))
    monkeypatch.setattr(SequenceTable, "append", raising(asyncio.CancelledError()))

    async with asyncio.timeout(20):
        with pytest.raises(InternalError), mesh_errors():
            await sequences.append(1, ids("b"))


async def test_stray_error_ends_its_sequence_and_says_nothing_of_itself(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GR-04
    sequences = Sequences(stub)
    await sequences.open(1)
    with monkeypatch.context() as patch:
        patch.setattr(SequenceTable, "append", raising(ValueError("secret")))
        broken = await sequences.append(1, ids("a"))
    await sequences.open(2)

    assert broken.error
    assert "secret" not in broken.error
    assert (await sequences.append(2, ids("b"))).text == "b"
    await sequences.finish()


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise error

    return fail


async def test_twenty_cancelled_calls_do_not_keep_others_waiting(stub: Stub) -> None:
    # GR-03
    cancelled = [Sequences(stub) for _ in range(20)]
    for sequences in cancelled:
        await sequences.open(1)
        await sequences.append(1, ids("a"))

    for sequences in cancelled:
        sequences.cancel()

    async with asyncio.timeout(20):
        for _ in range(4):
            other = Sequences(stub)
            await other.open(1)
            assert (await other.append(1, ids("a"), is_last=True)).text == "a"
            await other.finish()
