"""Prefill here, decode there: the same tokens as in one worker, and nothing left behind."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.batcher import ScheduledRequest
from engine.model_runner import Runner
from mesh.errors import InternalError, from_rpc_error
from mesh.v1 import decode_pb2_grpc, types_pb2
from tests.fakes import Logits
from tests.tiny_llama import make_tiny_model, reference_logits
from tests.worker_mesh import (
    BLOCK_SIZE,
    WorkerMesh,
    decode,
    decode_disaggregated,
    prefill,
    worker_mesh,
)
from tests.worker_wire import decode_request, sampling, wait_until

VOCAB_SIZE = 96
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def tiny_model(tiny_folder: Path) -> Any:
    return make_tiny_model(tiny_folder)


@pytest.fixture
async def mesh(tiny_model: Any, tiny_folder: Path, tmp_path: Path) -> AsyncIterator[WorkerMesh]:
    async with worker_mesh(tiny_folder, tmp_path) as mesh:
        yield mesh


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    drawn = random.Random(1000 * num_tokens + seed)
    return [drawn.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]


def naive_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(reference_logits(model, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


async def test_disaggregated_equals_local_equals_naive(mesh: WorkerMesh, tiny_model: Any) -> None:
    producer, consumer = await mesh.start_prefill(), await mesh.start_decode()
    local = await mesh.start_decode(worker_id="decode-1")
    params = sampling(10, num_logprobs=2, **GREEDY)
    # Around the edges of blocks and chunks, and longer than both.
    for num_tokens in (1, 3, 4, 5, 15, 16, 17, 50):
        prompt = make_prompt(num_tokens)

        disaggregated = await decode_disaggregated(producer, consumer, prompt, params)
        alone = await decode(local, prompt, params)

        assert disaggregated.token_ids == naive_greedy(tiny_model, prompt, 10)
        assert disaggregated.token_ids == alone.token_ids
        assert disaggregated.logprobs == alone.logprobs
        assert disaggregated.finish_reason == alone.finish_reason
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        assert disaggregated.kv_transfer_bytes == num_blocks * consumer.block_bytes
        assert alone.kv_transfer_bytes == 0
    for worker in (producer, consumer, local):
        await worker.wait_until_all_blocks_are_free()


async def test_seeded_sampling_and_penalties_do_not_notice_the_split(mesh: WorkerMesh) -> None:
    producer, consumer = await mesh.start_prefill(), await mesh.start_decode()
    local = await mesh.start_decode(worker_id="decode-1")
    for seed in range(4):
        params = sampling(
            12, seed=seed, temperature=1.3, top_p=0.9, frequency_penalty=0.7, logit_bias={5: 3.0}
        )
        prompt = make_prompt(13, seed)

        disaggregated = await decode_disaggregated(producer, consumer, prompt, params)

        alone = await decode(local, prompt, params)
        assert disaggregated.token_ids == alone.token_ids
        assert disaggregated.finish_reason == alone.finish_reason


async def test_requests_in_one_batch_get_what_they_get_alone(mesh: WorkerMesh) -> None:
    producer, consumer = await mesh.start_prefill(), await mesh.start_decode()
    local = await mesh.start_decode(worker_id="decode-1")
    prompts = [make_prompt(num_tokens) for num_tokens in (2, 9, 16, 23, 30, 37)]
    params = sampling(12, seed=7, ignore_eos=True)

    together = await asyncio.gather(
        *(decode_disaggregated(producer, consumer, prompt, params) for prompt in prompts)
    )

    for prompt, answer in zip(prompts, together, strict=True):
        assert answer.token_ids == (await decode(local, prompt, params)).token_ids


async def test_blocks_that_the_decode_worker_has_are_not_moved_again(mesh: WorkerMesh) -> None:
    producer, consumer = await mesh.start_prefill(), await mesh.start_decode()
    params = sampling(3, **GREEDY)
    prompt = make_prompt(18)
    first = await decode_disaggregated(producer, consumer, prompt, params)

    again = await decode_disaggregated(producer, consumer, prompt, params)
    longer = await decode_disaggregated(producer, consumer, [*prompt[:8], 9, 9, 9], params)

    assert again.token_ids == first.token_ids
    # 16 of 18 tokens fill blocks and can be found; 8 of 11.
    assert again.kv_transfer_bytes == consumer.block_bytes
    assert longer.kv_transfer_bytes == consumer.block_bytes


async def test_resumed_request_goes_on_as_if_it_had_never_moved(mesh: WorkerMesh) -> None:
    producer, consumer = await mesh.start_prefill(), await mesh.start_decode()
    params = sampling(14, seed=3, temperature=0.9, presence_penalty=0.5, ignore_eos=True)
    prompt = make_prompt(10)
    whole = (await decode(consumer, prompt, params)).token_ids

    here = await decode(consumer, prompt, params, whole[:5])
    elsewhere = await decode_disaggregated(producer, consumer, prompt, params, whole[:5])

    assert here.token_ids == whole[5:]
    assert elsewhere.token_ids == whole[5:]


async def test_request_over_with_its_first_token_leaves_nothing_held(mesh: WorkerMesh) -> None:
    producer = await mesh.start_prefill()

    finished = await prefill(producer, make_prompt(9), sampling(1, **GREEDY))

    assert finished.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert not finished.HasField("kv_handle")
    await producer.wait_until_all_blocks_are_free()


async def test_dead_prefill_worker_costs_time_and_no_token(mesh: WorkerMesh) -> None:
    # KV-19
    producer, consumer = await mesh.start_prefill(), await mesh.start_decode()
    params = sampling(8, **GREEDY)
    prompt = make_prompt(21)
    expected = (await decode(consumer, prompt, params)).token_ids
    handles = [
        (await prefill(producer, make_prompt(21, seed), params)).kv_handle for seed in range(5)
    ]
    first = await prefill(producer, prompt, params)

    await producer.stop()
    answers = await asyncio.gather(
        decode(consumer, prompt, params, list(first.first_token.token_ids), first.kv_handle),
        *(
            decode(consumer, make_prompt(21, seed), params, [5], handle)
            for seed, handle in enumerate(handles)
        ),
    )

    assert answers[0].token_ids == expected[1:]
    assert [len(answer.token_ids) for answer in answers] == [7] * 6
    await consumer.wait_until_all_blocks_are_free()


async def test_kv_whose_lease_is_over_is_computed_again(mesh: WorkerMesh) -> None:
    # KV-20: the blocks belong to another prompt by the time they are read.
    producer = await mesh.start_prefill(num_blocks=8, lease_s=0.05)
    consumer = await mesh.start_decode()
    params = sampling(8, **GREEDY)
    prompt = make_prompt(20)
    expected = (await decode(consumer, prompt, params)).token_ids
    first = await prefill(producer, prompt, params)
    await producer.wait_until_all_blocks_are_free()
    await prefill(producer, make_prompt(28, seed=1), params)

    fresh = await mesh.start_decode(worker_id="decode-1")
    answer = await decode(fresh, prompt, params, list(first.first_token.token_ids), first.kv_handle)

    assert answer.token_ids == expected[1:]


async def test_late_copy_never_reaches_blocks_of_another_request(mesh: WorkerMesh) -> None:
    # KV-21: delay the transfer, abort the decode, let another prompt want its blocks.
    producer = await mesh.start_prefill()
    consumer = await mesh.start_decode(num_blocks=12)
    params = sampling(8, **GREEDY)
    other = make_prompt(30, seed=1)
    expected = (await decode(consumer, other, params)).token_ids
    first = await prefill(producer, make_prompt(20), params)
    mesh.transport.gate.clear()
    stub = decode_pb2_grpc.DecodeServiceStub(consumer.channel)
    call = stub.Decode(decode_request("aborted", make_prompt(20), [5], params, first.kv_handle))
    await asyncio.wait_for(mesh.transport.arrived.wait(), 20)

    call.cancel()
    waiting = asyncio.create_task(decode(consumer, other, params))
    done, _ = await asyncio.wait({waiting}, timeout=0.3)
    assert not done, "it was given blocks that the copy may still write to"
    mesh.transport.gate.set()

    assert (await waiting).token_ids == expected
    await consumer.wait_until_all_blocks_are_free()


async def test_frozen_transfer_agent_costs_its_timeout_and_no_token(mesh: WorkerMesh) -> None:
    # GR-06, KV-21: nobody knows whether the copy will go on.
    producer = await mesh.start_prefill()
    consumer = await mesh.start_decode(kv_pull_timeout_s=0.2)
    params = sampling(8, **GREEDY)
    prompt = make_prompt(20)
    expected = (await decode(consumer, prompt, params)).token_ids
    other = await mesh.start_decode(worker_id="decode-1", kv_pull_timeout_s=0.2)
    mesh.transport.gate.clear()

    answer = await decode_disaggregated(producer, other, prompt, params)

    assert answer.token_ids == expected
    assert other.engine.load().num_free_blocks < other.engine.load().num_blocks
    mesh.transport.gate.set()
    await other.wait_until_all_blocks_are_free()


async def test_restarted_workers_are_new_ones_on_the_same_address(mesh: WorkerMesh) -> None:
    # KV-23
    producer = await mesh.start_prefill()
    consumer = await mesh.start_decode()
    params = sampling(6, **GREEDY)
    prompt = make_prompt(11)
    expected = await decode_disaggregated(producer, consumer, prompt, params)
    stale = await prefill(producer, prompt, params)

    for _ in range(3):
        address = producer.worker.address
        await producer.stop()
        producer = await mesh.start_prefill(listen=address)
        address = consumer.worker.address
        await consumer.stop()
        consumer = await mesh.start_decode(listen=address)

        token_ids = list(stale.first_token.token_ids)
        from_stale = await decode(consumer, prompt, params, token_ids, stale.kv_handle)
        fresh = await decode_disaggregated(producer, consumer, prompt, params)

        assert [*token_ids, *from_stale.token_ids] == expected.token_ids
        assert from_stale.kv_transfer_bytes == 0
        assert fresh.token_ids == expected.token_ids


class PoisoningRunner:
    """The real runner, except that one request's third row of logits is not a number."""

    def __init__(self, runner: Runner, poisoned_prompt: list[int]) -> None:
        self._runner = runner
        self._poisoned_prompt = poisoned_prompt

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def block_bytes(self) -> int:
        return self._runner.block_bytes

    def execute(
        self,
        scheduled: Sequence[ScheduledRequest],
        on_kv_written: Callable[[], None] | None = None,
    ) -> Logits:
        logits = self._runner.execute(scheduled, on_kv_written).copy()
        rows = [item.request for item in scheduled if item.samples]
        for row, request in enumerate(rows):
            is_third = len(request.output_token_ids) == 2
            if is_third and request.prompt_token_ids == self._poisoned_prompt:
                logits[row] = float("nan")
        return logits

    def close(self) -> None:
        self._runner.close()


async def test_row_that_is_not_a_number_ends_its_own_request_only(mesh: WorkerMesh) -> None:
    # SA-16 over the wire
    consumer = await mesh.start_decode()
    params = sampling(10, **GREEDY)
    prompts = [make_prompt(num_tokens) for num_tokens in (9, 17, 18, 26)]
    clean = [await decode(consumer, prompt, params) for prompt in prompts]
    engine = consumer.worker.loaded.engine
    engine._runner = PoisoningRunner(engine._runner, prompts[1])

    answers = await asyncio.gather(
        *(decode(consumer, prompt, params) for prompt in prompts), return_exceptions=True
    )

    failed = answers.pop(1)
    assert isinstance(failed, grpc.aio.AioRpcError)
    assert isinstance(from_rpc_error(failed), InternalError)
    assert answers == [clean[0], clean[2], clean[3]]
    await consumer.wait_until_all_blocks_are_free()
    assert consumer.engine.load().num_invalid_logits == 1


async def test_callers_that_leave_at_any_moment_leave_nothing_behind(mesh: WorkerMesh) -> None:
    # ST-05 at the workers
    producer = await mesh.start_prefill(lease_s=0.5)
    consumer = await mesh.start_decode()
    drawn = random.Random(5)
    params = sampling(60, **GREEDY)

    async def leave_early(seed: int) -> None:
        try:
            async with asyncio.timeout(drawn.uniform(0, 0.12)):
                await decode_disaggregated(
                    producer, consumer, make_prompt(drawn.randrange(1, 60), seed), params
                )
        except TimeoutError:
            return

    for start in range(0, 40, 8):
        await asyncio.gather(*(leave_early(seed) for seed in range(start, start + 8)))

    for worker in (producer, consumer):
        await wait_until(lambda worker=worker: not worker.worker.streams)  # type: ignore[misc]
        await worker.wait_until_all_blocks_are_free()
        assert worker.engine.load().num_running == worker.engine.load().num_waiting == 0
    prompt = make_prompt(12)
    after = await decode_disaggregated(producer, consumer, prompt, sampling(4, **GREEDY))
    assert after.token_ids == (await decode(consumer, prompt, sampling(4, **GREEDY))).token_ids
