"""TokenizerService over the wire: what it lists, encodes and decodes."""

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from mesh import telemetry
from mesh.client import mesh_errors
from mesh.errors import (
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    ModelNotFound,
)
from mesh.v1 import tokenizer_pb2, types_pb2
from tests.loop_clock import LoopClock
from tests.tokenizer_svc.served import EndedSpans, Stub, ids, serving
from tests.tokenizer_svc.synthetic import (
    Json,
    bytes_tokenizer,
    encode,
    sentencepiece_tokenizer,
    write_model,
)
from tokenizer_svc.encoder import Encoder
from tokenizer_svc.models import TokenizerModel, load_model
from tokenizer_svc.renderer import RenderLimits


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

    slowest_s = 0.0
    async with LoopClock() as clock:
        while not stuck[0].done():
            started_s = clock.now_s
            await stub.Encode(chat_request("smollm2", USER))
            slowest_s = max(slowest_s, clock.now_s - started_s)

    # Nobody waits for the template's time limit.
    assert slowest_s < 0.7
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

    for request in requests:
        refused = asyncio.create_task(try_encode(stub, request))
        slowest_s = 0.0
        while not refused.done():
            # Who is held up here is held up by what this process computes.
            started_s = time.process_time()
            await stub.ListModels(tokenizer_pb2.ListModelsRequest())
            slowest_s = max(slowest_s, time.process_time() - started_s)
        error = await refused

        assert isinstance(error, ContextLengthExceeded)
        assert "at least" in str(error)
        assert slowest_s < 0.3


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


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ValueError("secret")])
async def test_stray_error_in_the_handler_reaches_the_caller_as_internal(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    # GR-04
    async def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Encoder, "encode", fail)

    async with asyncio.timeout(20):
        with pytest.raises(InternalError) as caught, mesh_errors():
            await stub.Encode(chat_request("smollm2", USER))

    assert "secret" not in str(caught.value)
