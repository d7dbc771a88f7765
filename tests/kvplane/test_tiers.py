"""Colder tiers behind real engines: what comes back is what would have been computed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kv_transfer_svc.tiers.disk_store import DiskStore
from mesh.v1 import decode_pb2_grpc, prefill_pb2_grpc, types_pb2
from tests.kvplane.machines import (
    BLOCK_SIZE,
    GREEDY,
    SEEDED,
    Handover,
    Machines,
    make_prompt,
)
from tests.tiny_llama import make_tiny_model
from tests.transfer_agents import RunningAgent
from tests.worker_mesh import Answer, RunningWorker, decode
from tests.worker_wire import decode_request, prefill_request, wait_until

GB = 1 << 30
NUM_TOKENS = 50
NUM_FULL_BLOCKS = NUM_TOKENS // BLOCK_SIZE


async def tokens(worker: RunningWorker, prompt: list[int], **more: Any) -> Answer:
    """A local run, and how much of its prompt was cached."""
    return await decode(worker, prompt, GREEDY, **more)


async def num_cached(worker: RunningWorker, prompt: list[int], cache_salt: str = "") -> int:
    stub = decode_pb2_grpc.DecodeServiceStub(worker.channel)
    request = decode_request("cached", prompt, None, GREEDY)
    request.cache_salt = cache_salt
    async for event in stub.Decode(request, timeout=30):
        if event.HasField("finished"):
            return int(event.finished.num_cached_tokens)
    raise AssertionError("no end")


async def wait_until_stored(agent: RunningAgent, num_blocks: int) -> None:
    tiers = agent.agent.tiers
    assert tiers is not None
    await wait_until(lambda: len(tiers.host) >= num_blocks)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_what_one_worker_computed_another_does_not_compute_again(
    machines: Machines, params: types_pb2.SamplingParams
) -> None:
    agent = await machines.start_agent(host_memory_bytes=GB)
    first = await machines.start_decode(agent)
    second = await machines.start_decode(agent, worker_id="decode-1")
    prompt = make_prompt(NUM_TOKENS)
    expected = await decode(first, prompt, params)
    await wait_until_stored(agent, NUM_FULL_BLOCKS)

    answer = await decode(second, prompt, params)

    assert answer.token_ids == expected.token_ids
    assert agent.agent.tiers is not None
    assert agent.agent.tiers.stats.num_host_hits == NUM_FULL_BLOCKS
    for worker in (first, second):
        await worker.wait_until_all_blocks_are_free()


async def test_tiers_that_are_known_to_have_nothing_are_not_asked(machines: Machines) -> None:
    agent = await machines.start_agent(host_memory_bytes=GB)
    decoder = await machines.start_decode(agent)
    prompt = make_prompt(NUM_TOKENS)
    expected = await tokens(decoder, prompt)
    await wait_until_stored(agent, NUM_FULL_BLOCKS)
    other = await machines.start_decode(agent, worker_id="decode-1")
    prefiller = await machines.start_prefill(agent)

    request = decode_request("skips", prompt, None, GREEDY)
    request.num_tiered_tokens = 0
    decoded = [
        one
        async for one in decode_pb2_grpc.DecodeServiceStub(other.channel).Decode(
            request, timeout=30
        )
    ]
    prefill = prefill_request("skips", prompt, None, GREEDY)
    prefill.num_tiered_tokens = 0
    prefilled = [
        one
        async for one in prefill_pb2_grpc.PrefillServiceStub(prefiller.channel).Prefill(
            prefill, timeout=30
        )
    ]

    token_ids = [token for one in decoded for token in one.tokens.token_ids]
    assert token_ids == expected.token_ids
    assert list(prefilled[-1].finished.first_token.token_ids) == expected.token_ids[:1]
    assert agent.agent.tiers is not None
    assert agent.agent.tiers.stats.num_host_hits == 0


async def test_evicted_blocks_come_back(machines: Machines) -> None:
    agent = await machines.start_agent(host_memory_bytes=GB)
    worker = await machines.start_decode(agent, num_blocks=20)
    prompts = [make_prompt(NUM_TOKENS, seed) for seed in range(4)]
    cold = [(await tokens(worker, prompt)).token_ids for prompt in prompts]
    await wait_until_stored(agent, len(prompts) * NUM_FULL_BLOCKS)

    assert [(await tokens(worker, prompt)).token_ids for prompt in prompts] == cold

    assert agent.agent.tiers is not None
    assert agent.agent.tiers.stats.num_host_hits > 2 * NUM_FULL_BLOCKS
    await worker.wait_until_all_blocks_are_free()


async def test_prefill_worker_serves_handovers_from_a_colder_tier(machines: Machines) -> None:
    agent = await machines.start_agent(host_memory_bytes=GB)
    decoder = await machines.start_decode(agent)
    prompt = make_prompt(60)
    first = await machines.start_prefill(agent)
    expected = await Handover(first, decoder, prompt, GREEDY).run()
    await wait_until_stored(agent, 60 // BLOCK_SIZE)
    second = await machines.start_prefill(agent, worker_id="prefill-1")
    other = await machines.start_decode(agent, worker_id="decode-1", use_kv_tiers=False)

    answer = await Handover(second, other, prompt, GREEDY, "again").run()

    assert answer.token_ids == expected.token_ids
    assert agent.agent.tiers is not None
    assert agent.agent.tiers.stats.num_host_hits == (60 - 1) // BLOCK_SIZE


async def test_restarted_machine_is_warm(machines: Machines, tmp_path: Path) -> None:
    agent = await machines.start_agent(host_memory_bytes=GB, disk=DiskStore(tmp_path / "kv", GB))
    worker = await machines.start_decode(agent)
    prompt = make_prompt(NUM_TOKENS)
    expected = (await tokens(worker, prompt)).token_ids
    await wait_until_stored(agent, NUM_FULL_BLOCKS)
    await agent.agent.drain()
    await worker.stop()
    await agent.stop()

    agent = await machines.start_agent(host_memory_bytes=GB, disk=DiskStore(tmp_path / "kv", GB))
    worker = await machines.start_decode(agent)
    answer = await tokens(worker, prompt)

    assert answer.token_ids == expected
    assert agent.agent.tiers is not None
    assert agent.agent.tiers.stats.num_disk_hits == NUM_FULL_BLOCKS


async def test_damaged_file_is_computed_again(machines: Machines, tmp_path: Path) -> None:
    # KV-20
    agent = await machines.start_agent(disk=DiskStore(tmp_path / "kv", GB))
    worker = await machines.start_decode(agent)
    prompt = make_prompt(NUM_TOKENS)
    expected = (await tokens(worker, prompt)).token_ids
    assert agent.agent.tiers is not None
    disk = agent.agent.tiers.disk
    assert disk is not None
    await wait_until(lambda: len(disk) >= NUM_FULL_BLOCKS)
    await agent.agent.tiers.flush()
    for file in disk._files.values():
        data = bytearray(await asyncio.to_thread(file.path.read_bytes))
        for index in range(4, len(file.keys)):
            data[file.payload_offset + index * file.block_bytes + 100] ^= 255
        await asyncio.to_thread(file.path.write_bytes, data)
    fresh = await machines.start_decode(agent, worker_id="decode-1")

    answer = await tokens(fresh, prompt)

    assert answer.token_ids == expected
    assert agent.agent.tiers.stats.num_disk_hits == 4


async def test_tenants_do_not_share_a_colder_tier(machines: Machines) -> None:
    # KV-03
    agent = await machines.start_agent(host_memory_bytes=GB)
    first = await machines.start_decode(agent)
    second = await machines.start_decode(agent, worker_id="decode-1")
    third = await machines.start_decode(agent, worker_id="decode-2")
    prompt = make_prompt(NUM_TOKENS)
    await num_cached(first, prompt, "t1")
    await wait_until_stored(agent, NUM_FULL_BLOCKS)

    assert await num_cached(second, prompt, "t2") == 0
    assert await num_cached(second, prompt) == 0
    assert await num_cached(third, prompt, "t1") == NUM_FULL_BLOCKS * BLOCK_SIZE


async def test_models_types_and_block_sizes_do_not_meet_in_a_colder_tier(
    machines: Machines, tmp_path: Path
) -> None:
    # KV-25
    agent = await machines.start_agent(host_memory_bytes=GB)
    make_tiny_model(tmp_path / "other", seed=9)
    first = await machines.start_decode(agent)
    prompt = make_prompt(NUM_TOKENS)
    await num_cached(first, prompt)
    await wait_until_stored(agent, NUM_FULL_BLOCKS)

    different: list[dict[str, Any]] = [
        {"model_path": tmp_path / "other"},
        {"dtype": "bfloat16"},
        {"block_size": 8},
    ]
    for number, settings in enumerate(different):
        other = await machines.start_decode(agent, worker_id=f"other-{number}", **settings)
        assert await num_cached(other, prompt) == 0
    same = await machines.start_decode(agent, worker_id="same")
    assert await num_cached(same, prompt) == NUM_FULL_BLOCKS * BLOCK_SIZE


async def test_agent_that_ends_costs_the_tiers_and_no_request(machines: Machines) -> None:
    agent = await machines.start_agent(host_memory_bytes=GB)
    worker = await machines.start_decode(agent)
    prompt = make_prompt(NUM_TOKENS)
    expected = (await tokens(worker, prompt)).token_ids

    await agent.stop()

    assert (await tokens(worker, prompt)).token_ids == expected
    other = make_prompt(NUM_TOKENS, 1)
    assert len((await tokens(worker, other)).token_ids) == 12
    await worker.wait_until_all_blocks_are_free()
