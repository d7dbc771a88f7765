"""Decode takes KV over while prefill computes it: the same tokens, and never from half of it."""

import asyncio

import pytest

from mesh.errors import KvTransferFailed, WorkerUnavailable
from mesh.telemetry import Stopwatch
from mesh.v1 import prefill_pb2, prefill_pb2_grpc, types_pb2
from tests.kvplane.machines import (
    BLOCK_SIZE,
    CHUNK,
    GREEDY,
    SEEDED,
    Handover,
    Machines,
    gate,
    make_prompt,
    release,
)
from tests.worker_mesh import decode
from tests.worker_wire import wait_until


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_overlapped_equals_local_token_for_token(
    machines: Machines, num_machines: int, params: types_pb2.SamplingParams
) -> None:
    # KV-05
    pair = await machines.start_pair(num_machines)
    local = await machines.start_decode(pair.agent, worker_id="decode-1")
    agent = pair.agent.agent
    num_early = 0
    # Around the edges of blocks and chunks.
    for num_tokens in (17, 31, 32, 33, 47, 48, 100):
        prompt = make_prompt(num_tokens)
        num_pulls = agent.stats.num_pulls
        handover = Handover(pair.producer, pair.consumer, prompt, params)

        answer = await handover.run()

        assert answer.token_ids == (await decode(local, prompt, params)).token_ids
        num_early += handover.was_early
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        assert answer.kv_transfer_bytes == num_blocks * pair.consumer.block_bytes
        # The blocks' bell is heard before the agent has counted them.
        await wait_until(lambda before=num_pulls: agent.stats.num_pulls > before)  # type: ignore[misc]
    # One that is computed before anybody looks is handed over whole.
    assert num_early > 0
    await pair.wait_until_free()


async def test_blocks_move_before_the_prompt_is_computed(
    machines: Machines, num_machines: int
) -> None:
    pair = await machines.start_pair(num_machines)
    gated = gate(pair.producer)
    handover = Handover(pair.producer, pair.consumer, make_prompt(4 * CHUNK + 3), GREEDY)
    running = asyncio.create_task(handover.run())
    agent = pair.agent.agent

    for num_chunks in (1, 2, 3, 4):
        gated.steps.release()
        computed = num_chunks * CHUNK // BLOCK_SIZE * pair.consumer.block_bytes
        await wait_until(lambda expected=computed: agent.num_bytes == expected)  # type: ignore[misc]
    assert handover.answer.token_ids == []
    gated.steps.release()
    answer = await running

    assert len(answer.token_ids) == 12
    assert agent.stats.num_pulls == 1
    await pair.wait_until_free()


async def test_prefix_that_decode_has_is_not_moved_again(
    machines: Machines, num_machines: int
) -> None:
    pair = await machines.start_pair(num_machines)
    prompt = make_prompt(50)
    expected = (await Handover(pair.producer, pair.consumer, prompt, GREEDY).run()).token_ids

    again = await Handover(pair.producer, pair.consumer, prompt, GREEDY).run()

    assert again.token_ids == expected
    assert again.kv_transfer_bytes == pair.consumer.block_bytes
    await pair.wait_until_free()


async def test_time_before_the_first_token_is_not_charged_to_the_transfer(
    machines: Machines,
) -> None:
    pair = await machines.start_pair(1)
    gated = gate(pair.producer)
    handover = Handover(pair.producer, pair.consumer, make_prompt(40), GREEDY)
    whole = Stopwatch()
    running = asyncio.create_task(handover.run())
    gated.steps.release()
    await wait_until(lambda: pair.agent.agent.num_bytes > 0)
    waited = Stopwatch()
    await asyncio.sleep(0.5)  # what a slow prefill takes
    waited_ms = waited.elapsed_ms
    gated.steps.release(2)
    await running
    others_ms = whole.elapsed_ms - waited_ms

    stages = handover.stages_ms
    charged_ms = sum(
        stages.get(stage, 0) for stage in (types_pb2.STAGE_KV_TRANSFER, types_pb2.STAGE_DECODE_WAIT)
    )
    assert charged_ms <= others_ms + 50


async def test_prefill_that_is_cancelled_leaves_no_tokens_and_no_blocks(
    machines: Machines, num_machines: int
) -> None:
    # KV-08, KV-20
    pair = await machines.start_pair(num_machines)
    gated = gate(pair.producer)
    prompt = make_prompt(4 * CHUNK)
    stub = prefill_pb2_grpc.PrefillServiceStub(pair.producer.channel)
    handover = Handover(pair.producer, pair.consumer, prompt, GREEDY)
    call = stub.Prefill(
        prefill_pb2.PrefillRequest(
            request_id="r", model="tiny", prompt_token_ids=prompt, sampling_params=GREEDY
        )
    )
    gated.steps.release(2)
    response = await anext(aiter(call))
    handover.handle = response.progress.kv_handle
    decoding = asyncio.create_task(handover._decode([], awaits_first_token=True))
    await wait_until(lambda: pair.agent.agent.num_bytes > 0)

    call.cancel()

    # Told while the step goes on: let through before, the prefill could be quicker than the news.
    async with asyncio.timeout(20):
        with pytest.raises(Exception, match="is over"):
            await decoding
    gated.steps.release(10)
    assert handover.answer.token_ids == []
    await pair.wait_until_free()
    # What was computed and taken over before is as good as if nothing had happened.
    again = await Handover(pair.producer, pair.consumer, prompt, GREEDY, "again").run()
    alone = await decode(
        await machines.start_decode(pair.agent, worker_id="decode-1"), prompt, GREEDY
    )
    assert again.token_ids == alone.token_ids
    await pair.wait_until_free()


async def test_prefill_worker_that_dies_is_noticed_at_once(
    machines: Machines, num_machines: int
) -> None:
    # KV-19: 20 requests at once
    pair = await machines.start_pair(
        num_machines, num_blocks=512, max_num_batched_tokens=32, max_num_seqs=32
    )
    gated = gate(pair.producer)
    handovers = [
        Handover(pair.producer, pair.consumer, make_prompt(60, seed), GREEDY, f"r{seed}")
        for seed in range(20)
    ]
    running = [asyncio.create_task(handover.run()) for handover in handovers]
    # One chunk, so that none is computed to its end.
    gated.steps.release()
    await wait_until(lambda: any(h.has_handle.is_set() for h in handovers))

    stopping = asyncio.create_task(pair.producer.stop())

    async with asyncio.timeout(10):
        results = await asyncio.gather(*running, return_exceptions=True)
    gated.steps.release(1000)
    assert all(isinstance(result, BaseException) for result in results)
    await stopping
    await pair.consumer.wait_until_all_blocks_are_free()
    survivor = await machines.start_prefill(pair.source_agent, worker_id="prefill-1")
    answer = await Handover(survivor, pair.consumer, make_prompt(60), GREEDY).run()
    assert len(answer.token_ids) == 12


async def test_client_that_leaves_while_blocks_move_frees_both_sides(
    machines: Machines, num_machines: int
) -> None:
    # KV-16, KV-21
    pair = await machines.start_pair(num_machines)
    gated = gate(pair.producer)
    handover = Handover(pair.producer, pair.consumer, make_prompt(60), GREEDY)
    running = asyncio.create_task(handover.run())
    gated.steps.release(2)
    await wait_until(lambda: pair.agent.agent.num_bytes > 0)

    running.cancel()
    await asyncio.wait([running])
    gated.steps.release(10)

    await pair.wait_until_free()


async def test_handle_given_back_early_ends_the_handover_and_not_the_prefill(
    machines: Machines,
) -> None:
    pair = await machines.start_pair(1)
    gated = gate(pair.producer)
    handover = Handover(pair.producer, pair.consumer, make_prompt(60), GREEDY)
    running = asyncio.create_task(handover.run())
    gated.steps.release()
    await wait_until(lambda: pair.agent.agent.stats.num_active_pulls == 1)

    await release(pair.producer, "r")
    await pair.consumer.wait_until_all_blocks_are_free()
    gated.steps.release(10)

    with pytest.raises((KvTransferFailed, WorkerUnavailable)):
        await running
    await pair.wait_until_free()
