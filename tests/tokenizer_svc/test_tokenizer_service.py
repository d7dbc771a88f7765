import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from mesh import telemetry
from mesh.client import DEFAULT_MAX_MESSAGE_BYTES, Channels, mesh_errors
from mesh.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    MessageTooLarge,
    ModelNotFound,
)
from mesh.server import MeshServer
from mesh.v1 import tokenizer_pb2, tokenizer_pb2_grpc, types_pb2
from tests.tokenizer_svc.synthetic import (
    Json,
    bytes_tokenizer,
    encode,
    sentencepiece_tokenizer,
    write_model,
)
from tokenizer_svc.encoder import Encoder
from tokenizer_svc.guarded_tokenizer import load_tokenizer
from tokenizer_svc.models import TokenizerModel, load_model
from tokenizer_svc.renderer import RenderLimits
from tokenizer_svc.sequence_table import SequenceLimits
from tokenizer_svc.service import TokenizerServicer

Stub: TypeAlias = "tokenizer_pb2_grpc.TokenizerServiceAsyncStub"
Request = tokenizer_pb2.DetokenizeRequest
Response = tokenizer_pb2.DetokenizeResponse
TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
BYTES = load_tokenizer(bytes_tokenizer())
LOOPING = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@asynccontextmanager
async def serving(
    models: Sequence[TokenizerModel],
    *,
    max_open_sequences: int = 100,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
) -> AsyncIterator[tuple[Stub, TokenizerServicer]]:
    encoder = Encoder(num_threads=2, max_waiting=100)
    servicer = TokenizerServicer(
        models,
        encoder,
        sequence_limits=SequenceLimits(max_open_sequences=max_open_sequences),
        max_bad_words=256,
        max_message_bytes=max_message_bytes,
    )
    server = MeshServer(max_message_bytes=max_message_bytes)
    servicer.add_to(server)
    async with Channels() as channels:
        channel = channels.get(await server.start())
        yield tokenizer_pb2_grpc.TokenizerServiceStub(channel), servicer
    await server.stop(0)
    encoder.close()


@pytest.fixture(scope="session")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> TokenizerModel:
    """One token per byte, no chat template."""
    folder = write_model(tmp_path_factory.mktemp("bytes"), bytes_tokenizer())
    return load_model("bytes", folder, RenderLimits())


@pytest.fixture(scope="session")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerModel]:
    """A chat template that never ends."""
    folder = tmp_path_factory.mktemp("endless")
    write_model(folder, bytes_tokenizer(), chat_template=LOOPING)
    model = load_model("endless", folder, RenderLimits(num_processes=1, timeout_s=1))
    yield model
    model.close()


@pytest.fixture
async def stub(
    smollm2: TokenizerModel, bytes_model: TokenizerModel, endless_model: TokenizerModel
) -> AsyncIterator[Stub]:
    async with serving([smollm2, bytes_model, endless_model]) as (stub, _):
        yield stub


class EndedSpans(SpanProcessor):
    """Spans in the order in which they ended."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[ReadableSpan] = asyncio.Queue()

    def on_end(self, span: ReadableSpan) -> None:
        self.queue.put_nowait(span)


@pytest.fixture
def spans() -> Iterator[EndedSpans]:
    ended = EndedSpans()
    telemetry.start_tracing("tokenizer", ended)
    yield ended
    telemetry.shutdown()


class Sequences:
    """One Detokenize call: what to send, and the answers as they come."""

    def __init__(self, stub: Stub) -> None:
        self._call = stub.Detokenize()

    async def open(self, sequence_id: int, model: str = "bytes", **options: Any) -> None:
        event = Request.Open(model=model, **options)
        await self._call.write(Request(sequence_id=sequence_id, open=event))

    async def send(self, sequence_id: int, token_ids: list[int], **options: Any) -> None:
        event = Request.Append(token_ids=token_ids, **options)
        await self._call.write(Request(sequence_id=sequence_id, append=event))

    async def close(self, sequence_id: int) -> None:
        await self._call.write(Request(sequence_id=sequence_id, close=Request.Close()))

    async def answer(self) -> Response:
        response = await self._call.read()
        assert isinstance(response, Response)
        return response

    async def append(self, sequence_id: int, token_ids: list[int], **options: Any) -> Response:
        await self.send(sequence_id, token_ids, **options)
        response = await self.answer()
        assert response.sequence_id == sequence_id
        return response

    async def finish(self) -> None:
        await self._call.done_writing()
        assert await self._call.read() is grpc.aio.EOF

    def cancel(self) -> None:
        self._call.cancel()


def ids(text: str) -> list[int]:
    """One token per byte, as in the model "bytes"."""
    return encode(BYTES, text)


def chat_request(model: str, *messages: Any, **options: Any) -> tokenizer_pb2.EncodeRequest:
    chat = tokenizer_pb2.Chat(messages_json=json.dumps(messages), **options)
    return tokenizer_pb2.EncodeRequest(model=model, chat=chat)


USER = {"role": "user", "content": "hi"}


async def test_models_are_listed_in_the_order_of_configuration(stub: Stub) -> None:
    response = await stub.ListModels(tokenizer_pb2.ListModelsRequest())

    assert [model.name for model in response.models] == ["smollm2", "bytes", "endless"]
    first = response.models[0]
    assert (first.max_model_len, first.vocab_size) == (8192, 49152)
    assert list(first.eos_token_ids) == [2]
    assert first.has_chat_template
    assert not response.models[1].has_chat_template
    assert len(first.tokenizer_sha256) == 64
    assert first.created_at_s > 0
    assert not first.default_sampling_params.HasField("temperature")


async def test_sampling_defaults_are_passed_on_only_where_the_model_has_them(
    tmp_path: Path,
) -> None:
    defaults: Json = {"temperature": 0, "top_k": 5}
    folder = write_model(tmp_path, bytes_tokenizer(), generation_config=defaults)

    async with serving([load_model("m", folder, RenderLimits())]) as (stub, _):
        (model,) = (await stub.ListModels(tokenizer_pb2.ListModelsRequest())).models

    assert model.default_sampling_params == types_pb2.SamplingParams(temperature=0, top_k=5)


async def test_text_and_chats_are_encoded_and_timed(stub: Stub, smollm2: TokenizerModel) -> None:
    text = await stub.Encode(
        tokenizer_pb2.EncodeRequest(model="smollm2", text="Hello", bad_words=["London"])
    )
    chat = await stub.Encode(chat_request("smollm2", USER))

    assert list(text.token_ids) == encode(smollm2.guarded_tokenizer, "Hello")
    assert len(text.bad_words) == 2
    assert [timing.stage for timing in text.timings] == [types_pb2.STAGE_TOKENIZE]
    assert text.timings[0].duration_ms > 0
    prompt = smollm2.vocabulary.decode(list(chat.token_ids), skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_options_of_a_chat_are_passed_on(stub: Stub, smollm2: TokenizerModel) -> None:
    closed = await stub.Encode(chat_request("smollm2", USER, add_generation_prompt=False))
    opened = await stub.Encode(chat_request("smollm2", USER, continue_final_message=True))

    for response, end in ((closed, "hi<|im_end|>\n"), (opened, "user\nhi")):
        text = smollm2.vocabulary.decode(list(response.token_ids), skip_special_tokens=False)
        assert text.endswith(end)


# GW-18, TK-07, TK-10, TK-11: each failure has a status and a parameter.
@pytest.mark.parametrize(
    ("request_", "error_type", "param"),
    [
        (tokenizer_pb2.EncodeRequest(model="nope", text="x"), ModelNotFound, "model"),
        (tokenizer_pb2.EncodeRequest(model="SmolLM2", text="x"), ModelNotFound, "model"),
        (tokenizer_pb2.EncodeRequest(model="smollm2", text=""), InvalidRequest, "prompt"),
        (tokenizer_pb2.EncodeRequest(model="smollm2"), InvalidRequest, None),
        (
            tokenizer_pb2.EncodeRequest(model="smollm2", text="1 2", max_prompt_tokens=2),
            ContextLengthExceeded,
            "prompt",
        ),
        (
            tokenizer_pb2.EncodeRequest(model="smollm2", text="x", bad_words=["a", ""]),
            InvalidRequest,
            "bad_words[1]",
        ),
        (
            tokenizer_pb2.EncodeRequest(model="smollm2", text="x", bad_words=["a"] * 300),
            InvalidRequest,
            "bad_words",
        ),
        (chat_request("bytes", USER), InvalidRequest, "messages"),
        (chat_request("smollm2"), InvalidRequest, "messages"),
        (chat_request("smollm2", {"role": "x"}), InvalidRequest, "messages[0].role"),
        (chat_request("smollm2", USER, tools_json="{"), InvalidRequest, "tools"),
    ],
)
async def test_a_request_that_cannot_be_encoded_says_what_is_wrong(
    stub: Stub,
    request_: tokenizer_pb2.EncodeRequest,
    error_type: type[InvalidRequest],
    param: str | None,
) -> None:
    with pytest.raises(error_type) as caught, mesh_errors():
        await stub.Encode(request_)

    assert type(caught.value) is error_type
    assert caught.value.param == param
    assert await stub.Encode(chat_request("smollm2", USER))


# TK-12
async def test_a_template_that_never_ends_is_a_refusal_and_holds_up_no_one(stub: Stub) -> None:
    stuck = [asyncio.create_task(try_encode(stub, chat_request("endless", USER))) for _ in range(3)]
    loop = asyncio.get_running_loop()

    slowest = 0.0
    while not stuck[0].done():
        started = loop.time()
        await stub.Encode(chat_request("smollm2", USER))
        slowest = max(slowest, loop.time() - started)

    assert slowest < 1
    error = await stuck[0]
    assert isinstance(error, InvalidRequest)
    assert "took longer than 1 s" in str(error)
    for task in stuck[1:]:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)


async def try_encode(stub: Stub, request: tokenizer_pb2.EncodeRequest) -> Exception | None:
    try:
        with mesh_errors():
            await stub.Encode(request)
    except InvalidRequest as error:
        return error
    return None


# ST-17
async def test_others_are_answered_while_five_megabytes_are_refused(stub: Stub) -> None:
    text = "".join(random.Random(5).choices("abcdefghij \n", k=5_000_000))
    requests = [
        tokenizer_pb2.EncodeRequest(model="smollm2", text=text),
        chat_request("smollm2", {"role": "user", "content": text}),
    ]
    loop = asyncio.get_running_loop()

    for request in requests:
        refused = asyncio.create_task(try_encode(stub, request))
        slowest = 0.0
        while not refused.done():
            started = loop.time()
            await stub.ListModels(tokenizer_pb2.ListModelsRequest())
            slowest = max(slowest, loop.time() - started)
        error = await refused

        assert isinstance(error, ContextLengthExceeded)
        assert "at least" in str(error)
        assert slowest < 0.3


# GR-01
async def test_three_megabytes_of_text_and_half_a_million_ids_pass(stub: Stub) -> None:
    text = " the" * 750_000

    encoded = await stub.Encode(
        tokenizer_pb2.EncodeRequest(model="smollm2", text=text, max_prompt_tokens=1 << 20)
    )
    decoded = await stub.Decode(
        tokenizer_pb2.TokenizerServiceDecodeRequest(
            model="smollm2", token_ids=encoded.token_ids[:500_000]
        )
    )

    assert len(encoded.token_ids) == 750_000
    assert decoded.text == " the" * 500_000


# GR-01
async def test_an_answer_above_the_message_limit_is_refused_clearly(
    smollm2: TokenizerModel,
) -> None:
    async with serving([smollm2], max_message_bytes=1 << 20) as (stub, _):
        request = tokenizer_pb2.TokenizerServiceDecodeRequest(
            model="smollm2", token_ids=[1000] * 300_000, return_token_bytes=True
        )

        with pytest.raises(MessageTooLarge, match="ask for less"), mesh_errors():
            await stub.Decode(request)


async def test_ids_are_decoded_together_and_one_by_one(stub: Stub) -> None:
    token_ids = [*ids("é"), 256]

    shown = await stub.Decode(
        tokenizer_pb2.TokenizerServiceDecodeRequest(
            model="bytes", token_ids=token_ids, return_token_bytes=True
        )
    )
    skipped = await stub.Decode(
        tokenizer_pb2.TokenizerServiceDecodeRequest(
            model="bytes", token_ids=token_ids, skip_special_tokens=True
        )
    )

    assert shown.text == "é<|im_start|>"
    assert list(shown.token_bytes) == [b"\xc3", b"\xa9", b"<|im_start|>"]
    assert (skipped.text, list(skipped.token_bytes)) == ("é", [])


async def test_ids_outside_the_vocabulary_are_refused(stub: Stub) -> None:
    for model, error_type in (("bytes", InvalidRequest), ("nope", ModelNotFound)):
        with pytest.raises(error_type), mesh_errors():
            await stub.Decode(
                tokenizer_pb2.TokenizerServiceDecodeRequest(model=model, token_ids=[258])
            )


async def test_tokens_that_are_bytes_can_be_had_all_at_once(
    stub: Stub, smollm2: TokenizerModel
) -> None:
    [listed, *_] = (await stub.ListModels(tokenizer_pb2.ListModelsRequest())).models
    tokens = await stub.GetTokenBytes(tokenizer_pb2.GetTokenBytesRequest(model=smollm2.name))

    assert listed.has_byte_tokens
    assert tokens.tokenizer_sha256 == listed.tokenizer_sha256
    assert list(tokens.token_bytes) == list(smollm2.vocabulary.token_bytes)
    assert set(tokens.special_token_ids) == smollm2.vocabulary.special_ids


async def test_tokens_that_depend_on_their_neighbours_cannot(
    tmp_path: Path,
) -> None:
    folder = write_model(tmp_path, sentencepiece_tokenizer())
    model = load_model("pieces", folder, RenderLimits())
    async with serving([model]) as (stub, _):
        [listed] = (await stub.ListModels(tokenizer_pb2.ListModelsRequest())).models
        assert not listed.has_byte_tokens
        with pytest.raises(InvalidRequest, match="neighbours"), mesh_errors():
            await stub.GetTokenBytes(tokenizer_pb2.GetTokenBytesRequest(model="pieces"))


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

        await asyncio.wait_for(draining, 5)
        await sequences.open(2)
        await sequences.append(2, ids("x"))
        draining = asyncio.create_task(servicer.drain())
        sequences.cancel()  # frees what is open
        await asyncio.wait_for(draining, 5)


# OB-04
async def test_encoding_is_a_child_of_the_callers_span(stub: Stub, spans: EndedSpans) -> None:
    with telemetry.span("caller") as caller:
        await stub.Encode(chat_request("smollm2", USER))

    encoding = await spans.queue.get()
    assert encoding.name == "tokenizer.encode"
    assert encoding.parent is not None
    assert encoding.parent.span_id == caller.get_span_context().span_id
    assert encoding.attributes is not None
    assert encoding.attributes["pdmesh.num_prompt_tokens"] == 31


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

    async with asyncio.timeout(5):
        for _ in range(30):
            assert (await spans.queue.get()).name == "tokenizer.detokenize"

    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
