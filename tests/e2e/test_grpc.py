"""What an internal caller sees: reflection, health, and InferenceService."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mesh.v1 import inference_pb2, inference_pb2_grpc, tokenizer_pb2, types_pb2
from tests.e2e.harness import MODEL, RunningMesh

SERVED_BY = {
    "gateway": "mesh.v1.InferenceService",
    "tokenizer": "mesh.v1.TokenizerService",
    "scheduler": "mesh.v1.SchedulerService",
    "prefill": "mesh.v1.PrefillService",
    "decode": "mesh.v1.DecodeService",
    "kv_transfer": "mesh.v1.KvTransferService",
}


def reflected_services(address: str) -> set[str]:
    with grpc.insecure_channel(address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        [response] = stub.ServerReflectionInfo(iter([request]), timeout=10)
        return {service.name for service in response.list_services_response.service}


@pytest.mark.parametrize("role", SERVED_BY)
def test_reflection_lists_the_service_and_its_health(mesh: RunningMesh, role: str) -> None:
    address = mesh.records(role)[0].address

    names = reflected_services(mesh.state.grpc_address if role == "gateway" else address)

    assert {SERVED_BY[role], "grpc.health.v1.Health"} <= names


@pytest.fixture
def stub(mesh: RunningMesh) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
    with grpc.insecure_channel(mesh.state.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


INPUTS = [
    inference_pb2.GenerateRequest(text="The capital of France is"),
    inference_pb2.GenerateRequest(
        chat=tokenizer_pb2.Chat(
            messages_json='[{"role": "user", "content": "How many days are in a week?"}]'
        )
    ),
    inference_pb2.GenerateRequest(
        prompt_token_ids=types_pb2.TokenSequence(token_ids=[504, 3575, 282, 4649, 314])
    ),
]


@pytest.mark.parametrize("request_", INPUTS, ids=["text", "chat", "token_ids"])
def test_generate_streams_text_and_tokens_then_usage_and_timings(
    stub: inference_pb2_grpc.InferenceServiceStub, request_: inference_pb2.GenerateRequest
) -> None:
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(request_)
    request.model = MODEL
    request.sampling_params.max_tokens = 12
    request.sampling_params.temperature = 0

    *deltas, last = stub.Generate(request, timeout=60)

    tokens = [token for event in deltas for token in event.delta.tokens.token_ids]
    assert "".join(event.delta.text for event in deltas)
    assert last.finished.usage.completion_tokens == len(tokens) > 0
    assert last.finished.usage.prompt_tokens > 0
    stages = {timing.stage for timing in last.finished.timings}
    assert {types_pb2.STAGE_QUEUE, types_pb2.STAGE_DECODE_STEPS} <= stages
    assert last.finished.decode_worker_id.startswith("decode-")


def test_generate_refuses_an_unknown_model_with_a_status(
    stub: inference_pb2_grpc.InferenceServiceStub,
) -> None:
    request = inference_pb2.GenerateRequest(model="no-such-model", text="hello")

    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request, timeout=60))

    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
