"""Whatever happens to a transfer, the tokens are those of a run that nothing happened to."""

import asyncio
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kv_transfer_svc.transports import block_wire, segment_copy
from mesh.v1 import types_pb2
from tests.kvplane.machines import GREEDY, SEEDED, Handover, Machines, make_prompt, release
from tests.worker_mesh import RunningWorker, decode, prefill
from tests.worker_wire import wait_until

NUM_TOKENS = 60


class Reads:
    """Every read of source blocks, on this machine or for another: counted, held up, harmed."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.is_harmful = False

    def pause(self) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(20), "nobody let the read go on"

    async def wait_for_one(self) -> None:
        assert await asyncio.to_thread(self.has_begun.wait, 10)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    reads = Reads()
    copy_runs, send_piece = segment_copy.copy_runs, block_wire.send_piece

    def slow_copy(*arguments: Any) -> int:
        reads.pause()
        return copy_runs(*arguments)

    def slow_piece(connection: socket.socket, payload: memoryview) -> None:
        reads.pause()
        if not reads.is_harmful:
            send_piece(connection, payload)
            return
        sent = bytearray()
        send_piece(Recorder(sent), payload)  # type: ignore[arg-type]
        sent[-1] ^= 1
        connection.sendall(sent)

    monkeypatch.setattr(segment_copy, "copy_runs", slow_copy)
    monkeypatch.setattr(block_wire, "send_piece", slow_piece)
    yield reads
    reads.may_go_on.set()


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """Every write to destination blocks, held up. What comes from another machine is written here
    even when its connection is cut meanwhile.
    """
    writes = Reads()
    copy_runs, receive_payload = segment_copy.copy_runs, block_wire.receive_payload

    def slow_copy(*arguments: Any) -> int:
        writes.pause()
        return copy_runs(*arguments)

    def slow_receive(
        connection: socket.socket, frame: block_wire.Frame, destination: memoryview
    ) -> None:
        kept = bytearray(len(destination))
        receive_payload(connection, frame, memoryview(kept))
        writes.pause()
        destination[:] = kept

    monkeypatch.setattr(segment_copy, "copy_runs", slow_copy)
    monkeypatch.setattr(block_wire, "receive_payload", slow_receive)
    yield writes
    writes.may_go_on.set()


class Recorder:
    """A connection that keeps what is sent."""

    def __init__(self, sent: bytearray) -> None:
        self._sent = sent

    def sendall(self, data: Any) -> None:
        self._sent += data


async def undisturbed(
    machines: Machines, prompt: list[int], params: types_pb2.SamplingParams = GREEDY
) -> list[int]:
    """What one worker alone makes of a prompt."""
    agent = await machines.start_agent()
    worker = await machines.start_decode(agent, worker_id="alone")
    tokens = (await decode(worker, prompt, params)).token_ids
    await worker.stop()
    return tokens


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_damaged_bytes_are_computed_again(
    machines: Machines, reads: Reads, params: types_pb2.SamplingParams
) -> None:
    # KV-20
    prompt = make_prompt(NUM_TOKENS)
    expected = await undisturbed(machines, prompt, params)
    pair = await machines.start_pair(2)
    reads.is_harmful = True

    answer = await Handover(pair.producer, pair.consumer, prompt, params).run()

    assert answer.token_ids == expected
    assert reads.has_begun.is_set()
    assert answer.kv_transfer_bytes == 0
    await pair.wait_until_free()


async def test_source_agent_killed_in_the_middle_of_a_read(
    machines: Machines, reads: Reads
) -> None:
    # KV-19
    prompt = make_prompt(NUM_TOKENS)
    expected = await undisturbed(machines, prompt)
    pair = await machines.start_pair(2)
    reads.may_go_on.clear()
    running = asyncio.create_task(Handover(pair.producer, pair.consumer, prompt, GREEDY).run())
    await reads.wait_for_one()

    stopping = asyncio.create_task(pair.source_agent.stop())
    reads.may_go_on.set()

    async with asyncio.timeout(20):
        assert (await running).token_ids == expected
    await stopping
    await pair.wait_until_free()


async def test_own_agent_killed_in_the_middle_of_a_pull(
    machines: Machines, reads: Reads, num_machines: int
) -> None:
    # KV-19
    prompt = make_prompt(NUM_TOKENS)
    expected = await undisturbed(machines, prompt)
    pair = await machines.start_pair(num_machines)
    reads.may_go_on.clear()
    running = asyncio.create_task(Handover(pair.producer, pair.consumer, prompt, GREEDY).run())
    await reads.wait_for_one()

    stopping = asyncio.create_task(pair.agent.stop())
    reads.may_go_on.set()

    async with asyncio.timeout(20):
        assert (await running).token_ids == expected
    await stopping
    await pair.wait_until_free()


async def test_source_process_that_ends_while_it_is_read(
    machines: Machines, reads: Reads, num_machines: int
) -> None:
    # KV-19
    prompt = make_prompt(NUM_TOKENS)
    expected = await undisturbed(machines, prompt)
    pair = await machines.start_pair(num_machines)
    first = await prefill(pair.producer, prompt, GREEDY)
    reads.may_go_on.clear()
    token_ids = list(first.first_token.token_ids)
    decoding = asyncio.create_task(
        decode(pair.consumer, prompt, GREEDY, token_ids, first.kv_handle)
    )
    await reads.wait_for_one()

    await pair.producer.stop()
    reads.may_go_on.set()

    async with asyncio.timeout(10):
        answer = await decoding
    assert [*token_ids, *answer.token_ids] == expected
    await pair.consumer.wait_until_all_blocks_are_free()


async def fill_the_cache(worker: RunningWorker) -> None:
    """Until each of its blocks has got new content."""
    for seed in range(100, 104):
        await prefill_and_forget(worker, make_prompt(100, seed))


async def prefill_and_forget(worker: RunningWorker, prompt: list[int]) -> None:
    params = types_pb2.SamplingParams(max_tokens=1, temperature=0.0)
    await prefill(worker, prompt, params)


async def test_lease_that_ends_while_a_read_is_slow_and_blocks_that_are_reused_meanwhile(
    machines: Machines, reads: Reads, num_machines: int
) -> None:
    # KV-20, KV-21: half old and half new bytes are never used.
    prompt = make_prompt(NUM_TOKENS)
    expected = await undisturbed(machines, prompt)
    pair = await machines.start_pair(num_machines, num_blocks=40)
    first = await prefill(pair.producer, prompt, GREEDY)
    token_ids = list(first.first_token.token_ids)
    reads.may_go_on.clear()
    decoding = asyncio.create_task(
        decode(pair.consumer, prompt, GREEDY, token_ids, first.kv_handle)
    )
    await reads.wait_for_one()

    # As if the lease had run out.
    pair.producer.engine.release_hold(first.kv_handle.handle_id)
    await fill_the_cache(pair.producer)
    reads.may_go_on.set()
    answer = await decoding

    assert [*token_ids, *answer.token_ids] == expected
    assert answer.kv_transfer_bytes == 0
    await pair.consumer.wait_until_all_blocks_are_free()


async def test_lease_that_ends_while_a_read_is_slow_costs_nothing_if_the_blocks_were_left_alone(
    machines: Machines, reads: Reads, num_machines: int
) -> None:
    prompt = make_prompt(NUM_TOKENS)
    expected = await undisturbed(machines, prompt)
    pair = await machines.start_pair(num_machines)
    first = await prefill(pair.producer, prompt, GREEDY)
    token_ids = list(first.first_token.token_ids)
    reads.may_go_on.clear()
    decoding = asyncio.create_task(
        decode(pair.consumer, prompt, GREEDY, token_ids, first.kv_handle)
    )
    await reads.wait_for_one()

    pair.producer.engine.release_hold(first.kv_handle.handle_id)
    await wait_until(lambda: pair.producer.engine.load().num_leases == 0)
    reads.may_go_on.set()
    answer = await decoding

    assert [*token_ids, *answer.token_ids] == expected
    assert answer.kv_transfer_bytes > 0


async def test_blocks_of_an_aborted_decode_are_not_reused_while_they_are_written(
    machines: Machines, writes: Reads, num_machines: int
) -> None:
    # KV-21
    prompt, other = make_prompt(NUM_TOKENS), make_prompt(NUM_TOKENS, 1)
    expected = await undisturbed(machines, other)
    # Room for one of them and a half.
    pair = await machines.start_pair(num_machines, num_blocks=27)
    writes.may_go_on.clear()
    aborted = asyncio.create_task(Handover(pair.producer, pair.consumer, prompt, GREEDY).run())
    await writes.wait_for_one()
    aborted.cancel()
    await asyncio.wait([aborted])

    local = asyncio.create_task(decode(pair.consumer, other, GREEDY))
    done, _ = await asyncio.wait([local], timeout=0.2)
    assert not done
    writes.may_go_on.set()

    assert (await local).token_ids == expected
    await pair.wait_until_free()


async def test_restarted_workers_are_told_apart_from_their_former_selves(
    machines: Machines, num_machines: int
) -> None:
    # KV-23
    prompt = make_prompt(NUM_TOKENS)
    expected = await undisturbed(machines, prompt)
    pair = await machines.start_pair(num_machines)
    listen = pair.producer.worker.server.address
    for number in range(10):
        first = await prefill(pair.producer, prompt, GREEDY)
        token_ids = list(first.first_token.token_ids)
        await pair.producer.stop()
        pair.producer = await machines.start_prefill(pair.source_agent, listen=listen)
        consumer = await machines.start_decode(pair.agent, worker_id=f"decode-{number}")

        # A handle of the former process, then one of the new one.
        stale = await decode(consumer, prompt, GREEDY, token_ids, first.kv_handle)
        fresh = await Handover(pair.producer, pair.consumer, prompt, GREEDY).run()

        assert [*token_ids, *stale.token_ids] == fresh.token_ids == expected
        assert stale.kv_transfer_bytes == 0
        await consumer.stop()
    await pair.wait_until_free()


async def test_storm_of_aborts_leaves_every_block_free(
    machines: Machines, num_machines: int
) -> None:
    # KV-16
    pair = await machines.start_pair(num_machines, num_blocks=128)
    chance = random.Random(4)

    async def one(number: int) -> None:
        handover = Handover(
            pair.producer, pair.consumer, make_prompt(40, number), GREEDY, f"r{number}"
        )
        running = asyncio.create_task(handover.run())
        if chance.random() < 0.8:
            await asyncio.wait([running], timeout=chance.random() * 0.3)
            running.cancel()
        await asyncio.wait([running])
        await release(pair.producer, f"r{number}")
        if not running.cancelled() and (error := running.exception()) is not None:
            raise error

    for batch in range(4):
        await asyncio.gather(*(one(10 * batch + number) for number in range(10)))

    await wait_until(
        lambda: all(
            (load := worker.engine.load()).num_free_blocks == load.num_blocks
            and load.num_leases == 0
            for worker in (pair.producer, pair.consumer)
        ),
    )
    assert pair.agent.agent.stats.num_active_pulls == 0
    prompt = make_prompt(NUM_TOKENS)
    answer = await Handover(pair.producer, pair.consumer, prompt, GREEDY).run()
    assert answer.token_ids == await undisturbed(machines, prompt)
