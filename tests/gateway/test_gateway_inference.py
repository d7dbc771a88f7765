"""InferenceService: the same pipeline from a plain gRPC client."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
import pytest_asyncio

from mesh.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    WorkerUnavailable,
    from_rpc_error,
)
from mesh.v1 import inference_pb2, inference_pb2_grpc, tokenizer_pb2, types_pb2
from tests.gateway.fake_tokenizer import EOS, MODEL, VOCAB_SIZE, WINDOW
from tests.gateway.fake_workers import Fault
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import RunningGateway, run_gateway

HELLO = "Hello, world!"
Stub: TypeAlias = "inference_pb2_grpc.InferenceServiceAsyncStub"


@pytest_asyncio.fixture(loop_scope="module")
async def stub(gateway: RunningGateway) -> "AsyncIterator[Stub]":
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


async def generate(
    stub: "Stub", request: inference_pb2.GenerateRequest, **options: Any
) -> tuple[str, list[int], inference_pb2.GenerateFinished]:
    text, token_ids, finished = "", list[int](), None
    async for response in stub.Generate(request, **options):
        assert finished is None
        if response.HasField("delta"):
            text += response.delta.text
            token_ids += response.delta.tokens.token_ids
        else:
            finished = response.finished
    assert finished is not None
    return text, token_ids, finished


@pytest.mark.parametrize(
    "given",
    [
        {"text": "hi"},
        {"prompt_token_ids": types_pb2.TokenSequence(token_ids=b"hi")},
        {"chat": tokenizer_pb2.Chat(messages_json='[{"role":"user","content":"hi"}]')},
    ],
)
async def test_every_kind_of_input_is_continued(
    stub: "Stub", mesh: FakeMesh, given: dict[str, Any]
) -> None:
    request = inference_pb2.GenerateRequest(model=MODEL, **given)
    text, token_ids, finished = await generate(stub, request)

    assert text == HELLO
    assert token_ids == [*HELLO.encode(), EOS]
    assert finished.finish_reason == types_pb2.FINISH_REASON_STOP
    assert finished.stop_token_id == EOS
    assert finished.usage.completion_tokens == len(HELLO) + 1
    assert finished.prefill_worker_id == "prefill-0"
    assert finished.decode_worker_id == "decode-0"
    stages = {timing.stage for timing in finished.timings}
    assert {types_pb2.STAGE_PREFILL_COMPUTE, types_pb2.STAGE_DECODE_STEPS} <= stages


async def test_parameters_and_stop_strings_work_as_over_http(stub: "Stub", mesh: FakeMesh) -> None:
    request = inference_pb2.GenerateRequest(
        text="hi",
        stop=["wor"],
        sampling_params=types_pb2.SamplingParams(
            max_tokens=50, temperature=0, seed=-5, num_logprobs=2
        ),
        request_id="mine",
        priority=4,
    )
    text, _, finished = await generate(stub, request)

    assert text == "Hello, "
    assert finished.stop_string == "wor"
    params = mesh.prefill.requests[0].sampling_params
    assert (params.max_tokens, params.seed, params.num_logprobs) == (50, -5, 2)
    assert params.HasField("temperature")
    assert mesh.scheduler.admits[0].priority == 4


async def test_class_and_objective_reach_the_scheduler(
    stub: "Stub", ruled_stub: "Stub", mesh: FakeMesh
) -> None:
    plain = inference_pb2.GenerateRequest(text="hi")
    offline = inference_pb2.GenerateRequest(
        text="hi", priority_class=types_pb2.PRIORITY_CLASS_OFFLINE, ttft_objective_ms=750
    )

    await generate(stub, plain)
    await generate(stub, offline)
    # A rule rewrites the request, and keeps what it does not name.
    await generate(ruled_stub, offline)

    asked = [(admit.priority_class, admit.ttft_objective_ms) for admit in mesh.scheduler.admits]
    assert asked == [
        (types_pb2.PRIORITY_CLASS_ONLINE, 0),
        (types_pb2.PRIORITY_CLASS_OFFLINE, 750),
        (types_pb2.PRIORITY_CLASS_OFFLINE, 750),
    ]
    assert mesh.prefill.requests[-1].sampling_params.seed == 7


async def test_class_that_does_not_exist_is_refused(stub: "Stub", mesh: FakeMesh) -> None:
    request = inference_pb2.GenerateRequest(text="hi")
    request.MergeFromString(b"\x60\x07")  # field 12: 7

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, request)

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not mesh.scheduler.admits


async def test_stream_is_resumed_here_too(stub: "Stub", mesh: FakeMesh) -> None:
    mesh.decode.faults = [Fault(after=4, error=WorkerUnavailable("gone"))]

    text, token_ids, _ = await generate(stub, inference_pb2.GenerateRequest(text="hi"))

    assert text == HELLO
    assert len(token_ids) == len(HELLO) + 1


Request = inference_pb2.GenerateRequest


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Request(model="x", text="hi"), ModelNotFound),
        (Request(), InvalidRequest),
        (Request(text=""), InvalidRequest),
        (Request(text="hi", stop=[""]), InvalidRequest),
        (Request(text="hi", stop=["x" * 1025]), InvalidRequest),
        (
            Request(text="hi", sampling_params=types_pb2.SamplingParams(stop_token_ids=[7] * 1025)),
            InvalidRequest,
        ),
        (
            Request(text="hi", sampling_params=types_pb2.SamplingParams(temperature=float("nan"))),
            InvalidRequest,
        ),
        (Request(text="hi", sampling_params=types_pb2.SamplingParams(top_p=7)), InvalidRequest),
        (
            Request(prompt_token_ids=types_pb2.TokenSequence(token_ids=[VOCAB_SIZE])),
            InvalidRequest,
        ),
        (
            Request(text="hi", sampling_params=types_pb2.SamplingParams(max_tokens=WINDOW)),
            ContextLengthExceeded,
        ),
    ],
)
async def test_bad_request_is_refused(
    stub: "Stub", mesh: FakeMesh, request_: Request, error: type[Exception]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, request_)

    assert isinstance(from_rpc_error(caught.value), error)
    assert not mesh.scheduler.admits


async def test_full_mesh_says_when_to_come_back(stub: "Stub", mesh: FakeMesh) -> None:
    mesh.scheduler.error = QueueFull("full", retry_after_s=3)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, Request(text="hi"))

    error = from_rpc_error(caught.value)
    assert isinstance(error, QueueFull)
    assert error.retry_after_s == 3


async def test_callers_deadline_bounds_the_work(stub: "Stub", mesh: FakeMesh) -> None:
    mesh.prefill.start_gate = asyncio.Event()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, Request(text="hi"), timeout=0.5)

    assert isinstance(from_rpc_error(caught.value), DeadlineExceeded)
    assert mesh.prefill.deadlines_s[0] is not None
    assert mesh.prefill.deadlines_s[0] <= 0.5
    await mesh.quiet()


async def test_cancelling_the_call_stops_the_work(
    stub: "Stub", mesh: FakeMesh, gateway: RunningGateway
) -> None:
    mesh.model.default = [ord("x")] * 5000
    mesh.decode.steps = asyncio.Semaphore(3)
    call = stub.Generate(Request(text="hi"))
    await call.read()
    await mesh.decode.was_active.wait()

    call.cancel()

    async with asyncio.timeout(20):
        await mesh.quiet()
        await gateway.core.in_flight.wait_idle()


RULES = """
headers: {forward: [x-tenant]}
rules:
  - {when: {model: alias}, rewrite_model: byte-model}
  - {when: {route: inference}, clamp: {max_tokens: {max: 4}}, default: {temperature: 0.5, seed: 7}}
  - {when: {route: chat}, force: {max_tokens: 1}}
  - {when: {header: {x-tenant: t1}}, force: {top_k: 3}}
  - {when: {body: {path: "messages[*].role", equals: tool}}, force: {min_p: 0.25}}
  - name: no-fishing
    reject: {message: no fishing, if: {path: prompt, like: "*fish*"}}
"""


@pytest_asyncio.fixture(loop_scope="module")
async def ruled_stub(mesh: FakeMesh, tmp_path: Path) -> "AsyncIterator[Stub]":
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    async with (
        run_gateway(mesh, rules_path=path) as gateway,
        grpc.aio.insecure_channel(gateway.grpc_address) as channel,
    ):
        yield inference_pb2_grpc.InferenceServiceStub(channel)


async def test_rules_apply_and_what_the_caller_said_stays(
    ruled_stub: "Stub", mesh: FakeMesh, caplog: pytest.LogCaptureFixture
) -> None:
    request = inference_pb2.GenerateRequest(
        model="alias",
        text="hi",
        sampling_params=types_pb2.SamplingParams(
            max_tokens=9,
            temperature=0,
            logit_bias={5: -1.5},
            bad_words=[types_pb2.TokenSequence(token_ids=[1, 2])],
            num_prompt_logprobs=0,
        ),
        stop=["world"],
        cache_salt="s",
        priority=3,
    )
    caplog.set_level(logging.INFO)
    call = ruled_stub.Generate(request, metadata=[("x-tenant", "t1")])
    responses = [response async for response in call]

    params = mesh.prefill.requests[-1].sampling_params
    assert (params.max_tokens, params.temperature, params.seed, params.top_k) == (4, 0, 7, 3)
    assert dict(params.logit_bias) == {5: -1.5}
    assert [list(words.token_ids) for words in params.bad_words] == [[1, 2]]
    assert len(responses[0].delta.tokens.prompt_logprobs) == len(b"hi") - 1
    [admit] = mesh.scheduler.admits
    assert (admit.cache_salt, admit.priority) == ("s", 3)
    assert responses[-1].finished.usage.completion_tokens == 4
    trailing = dict(await call.trailing_metadata() or ())
    actions = "rewrite_model:byte-model, default:seed, clamp:max_tokens, force:top_k"
    assert trailing["x-pdmesh-param-actions"] == actions
    [line] = [one.__dict__ for one in caplog.records if one.message == "request finished"]
    assert line["param_actions"] == actions


async def test_untouched_request_is_served_as_without_rules(
    stub: "Stub", ruled_stub: "Stub", mesh: FakeMesh
) -> None:
    params = types_pb2.SamplingParams(max_tokens=3, temperature=0.7, seed=2**63 - 1)
    request = inference_pb2.GenerateRequest(model=MODEL, text="hi", sampling_params=params)

    await generate(stub, request)
    await generate(ruled_stub, request)

    first, second = (one.sampling_params for one in mesh.prefill.requests)
    assert first == second


async def test_rules_see_messages_and_may_refuse(ruled_stub: "Stub", mesh: FakeMesh) -> None:
    messages = '[{"role":"user","content":"hé"},{"role":"tool","tool_call_id":"c","content":"x"}]'
    chat = tokenizer_pb2.Chat(messages_json=messages, template_kwargs_json='{"a":1}')
    await generate(ruled_stub, inference_pb2.GenerateRequest(model=MODEL, chat=chat))
    assert mesh.prefill.requests[-1].sampling_params.min_p == 0.25
    assert json.loads(mesh.tokenizer.chats[-1].messages_json) == json.loads(messages)
    assert json.loads(mesh.tokenizer.chats[-1].template_kwargs_json) == {"a": 1}

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(ruled_stub, inference_pb2.GenerateRequest(model=MODEL, text="a fish"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "no fishing"

    broken = tokenizer_pb2.Chat(messages_json='[{"role":')
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(ruled_stub, inference_pb2.GenerateRequest(model=MODEL, chat=broken))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_gateway_that_drains_finishes_its_calls_and_takes_no_more(mesh: FakeMesh) -> None:
    mesh.decode.steps = asyncio.Semaphore(2)
    request = inference_pb2.GenerateRequest(text="hi")
    async with (
        run_gateway(mesh) as gateway,
        grpc.aio.insecure_channel(gateway.grpc_address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        running = asyncio.create_task(generate(stub, request))
        await mesh.decode.was_active.wait()

        draining = asyncio.create_task(gateway.rest.drain())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stub, request)
        for _ in HELLO:
            mesh.decode.steps.release()
        text, _, _ = await running
        await draining

    assert isinstance(from_rpc_error(caught.value), Draining)
    assert text == HELLO
