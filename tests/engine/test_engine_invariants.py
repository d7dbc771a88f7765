"""Requests come, wait, move, fail and are aborted at random; every block comes back."""

import asyncio
import random
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_pool import BlockEvents
from engine.config import SpeculationLimits
from engine.layered_prefill import LayeredPrefill
from engine.request import (
    EngineEvent,
    RemoteKvWanted,
    Request,
    RequestFailed,
    RequestStatus,
    TokenOutput,
)
from engine.sampling import SamplingParams
from mesh.block_index import BlockIndex
from mesh.block_publisher import BlockPublisher
from mesh.redis_client import connect_redis
from tests.fakes import FakeClock, MemoryRunner, make_engine, naive_generate
from tests.valkey import running_valkey

BLOCK_SIZE = 2
NUM_BLOCKS = 14
MAX_MODEL_LEN = 20
VOCAB_SIZE = 40


class EngineMachine(RuleBasedStateMachine):
    """KV-08, KV-16, KV-21: an engine, and what a caller knows about it."""

    @initialize(
        max_num_seqs=st.integers(1, 4),
        extra_budget=st.integers(0, 6),
        threshold=st.integers(0, 4),
        speculation=st.none() | st.builds(SpeculationLimits, st.integers(1, 7), st.just(1)),
        layers_beside_decodes=st.none() | st.integers(1, 4),
    )
    def start(
        self,
        max_num_seqs: int,
        extra_budget: int,
        threshold: int,
        speculation: SpeculationLimits | None,
        layers_beside_decodes: int | None,
    ) -> None:
        self.runner = MemoryRunner(NUM_BLOCKS, BLOCK_SIZE)
        self.runner.clock = clock = FakeClock()
        layered = layers_beside_decodes and LayeredPrefill(
            self.runner.begin, layers_beside_decodes, few_tokens=1, clock=clock
        )
        self.runner.is_broken = lambda request: request.request_id in self.broken
        self.engine = make_engine(
            NUM_BLOCKS,
            BLOCK_SIZE,
            runner=self.runner,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            long_prefill_token_threshold=threshold,
            max_model_len=MAX_MODEL_LEN,
            speculation=speculation,
            layered=layered or None,
            clock=clock,
        )
        self.engine.on_block_events = self.learn
        self.findable: set[bytes] = set()
        self.live: dict[str, Request] = {}
        self.expected: dict[str, list[int]] = {}
        self.produced: dict[str, list[int]] = {}
        self.wanted: dict[str, tuple[RemoteKvWanted, list[int]]] = {}
        # Go on without an answer, which is still to come.
        self.late: set[str] = set()
        self.held: set[str] = set()
        self.broken: set[str] = set()
        self.num_requests = 0

    def learn(self, events: BlockEvents) -> None:
        self.findable |= set(events.stored)
        self.findable -= set(events.removed)

    @rule(
        length=st.integers(1, MAX_MODEL_LEN - 2),
        first=st.integers(3, 4),
        max_tokens=st.integers(1, 8),
        kind=st.sampled_from(["local", "hold", "remote", "resumed"]),
    )
    def add(self, length: int, first: int, max_tokens: int, kind: str) -> None:
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        prompt = [first] * (length // 2) + [first + 2] * (length - length // 2)
        params = SamplingParams(max_tokens, temperature=0.8, seed=length)
        expected = naive_generate(prompt, params, VOCAB_SIZE, MAX_MODEL_LEN)
        has_token = kind in ("remote", "resumed") and len(expected) > 1
        request = Request(
            request_id,
            prompt,
            params,
            expected[:1] if has_token else [],
            hold_blocks=kind == "hold",
            remote_kv=kind == "remote" and has_token,
        )
        self.engine.add_request(request)
        self.live[request_id] = request
        self.expected[request_id] = expected
        self.produced[request_id] = expected[:1] if has_token else []

    @rule()
    def step(self) -> None:
        for event in self.engine.step():
            self.observe(event)

    def observe(self, event: EngineEvent) -> None:
        match event:
            case RemoteKvWanted(request_id=request_id):
                # An abort may shorten the engine's knowledge, but not the writer's.
                self.wanted[request_id] = (event, self.live[request_id].token_ids[:-1])
            case RequestFailed(request_id=request_id):
                assert request_id in self.broken
                del self.live[request_id]
            case TokenOutput(request_id=request_id):
                produced = self.produced[request_id]
                produced.append(event.token_id)
                assert produced == self.expected[request_id][: len(produced)]
                if event.is_last:
                    request = self.live.pop(request_id)
                    if event.finish_reason is not None:
                        assert produced == self.expected[request_id]
                    else:
                        assert request.hold_blocks
                        self.held.add(request_id)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 50))
    def abort(self, index: int) -> None:
        request_id = sorted(self.live)[index % len(self.live)]
        assert self.engine.abort(request_id)
        del self.live[request_id]

    @rule(index=st.integers(0, 50))
    def abort_again(self, index: int) -> None:
        request_id = f"r{index}"
        if request_id not in self.live:
            assert not self.engine.abort(request_id)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 50))
    def release_hold(self, index: int) -> None:
        request_id = sorted(self.held)[index % len(self.held)]
        self.held.remove(request_id)
        assert self.engine.release_hold(request_id)
        assert not self.engine.release_hold(request_id)

    @precondition(lambda self: self.wanted)
    @rule(index=st.integers(0, 50), succeeds=st.booleans())
    def answer_remote(self, index: int, succeeds: bool) -> None:
        request_id = sorted(self.wanted)[index % len(self.wanted)]
        wanted, token_ids = self.wanted.pop(request_id)
        start = wanted.first_block_index * BLOCK_SIZE
        table = [0] * wanted.first_block_index + list(wanted.block_ids)
        # Also when nobody waits any more: the writer does not know.
        content = token_ids[start:] if succeeds else [39] * len(token_ids[start:])
        self.runner.write(table, start, content)
        answer = self.engine.remote_kv_done if succeeds else self.engine.remote_kv_failed
        assert answer(request_id) == (request_id in self.live and request_id not in self.late)
        assert not answer(request_id)

    @precondition(lambda self: self.wanted)
    @rule(index=st.integers(0, 50))
    def do_without_remote(self, index: int) -> None:
        request_id = sorted(self.wanted)[index % len(self.wanted)]
        self.engine.remote_kv_late(request_id)
        self.late.add(request_id)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 50))
    def break_one(self, index: int) -> None:
        self.broken.add(sorted(self.live)[index % len(self.live)])

    @invariant()
    def every_block_has_its_owners_and_no_others(self) -> None:
        engine = self.engine
        owned = Counter(
            block_id
            for block_ids in (
                *(request.block_ids for request in engine._table.requests.values()),
                *engine._table.held.values(),
                *engine._table.quarantined.values(),
            )
            for block_id in block_ids
        )
        owners = engine._pool._num_owners
        assert all(owners[block_id] == owned[block_id] for block_id in range(NUM_BLOCKS))
        assert engine.load().num_free_blocks == NUM_BLOCKS - len(owned)

    @invariant()
    def the_tables_hold_what_the_caller_knows(self) -> None:
        assert set(self.engine._table.requests) == set(self.live)
        assert set(self.engine._table.held) == self.held
        nobody_waits = {name for name in self.wanted if name in self.late or name not in self.live}
        assert set(self.engine._table.quarantined) == nobody_waits

    @invariant()
    def what_can_be_found_was_computed(self) -> None:
        pool = self.engine._pool
        for key in self.findable:
            [block_id] = pool.longest_prefix([key])
            assert (self.runner.memory[block_id] >= 0).all()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        # Everything that can still happen happens; then all is as in the beginning.
        while self.live or self.wanted or self.held:
            for request_id in sorted(self.wanted):
                del self.wanted[request_id]
                self.engine.remote_kv_failed(request_id)
            for request_id in sorted(self.held):
                self.held.remove(request_id)
                self.engine.release_hold(request_id)
            for event in self.engine.step():
                self.observe(event)
            if self.engine.is_stalled:
                assert not self.live.keys() - self.wanted.keys(), "a request waits for nothing"
        load = self.engine.load()
        assert load.num_free_blocks == load.num_blocks
        assert (load.num_running, load.num_waiting, load.num_leases) == (0, 0, 0)


EngineMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
test_every_block_comes_back = EngineMachine.TestCase


class Storm:
    """Requests of all kinds, each of which is aborted after some steps, in whichever state."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.machine = EngineMachine()
        self.machine.start(4, 6, 0, SpeculationLimits(3, 1), 2)
        self._ends_at: dict[str, int] = {}
        self._num_steps = 0
        # In which states they were when they were aborted.
        self.states: Counter[RequestStatus] = Counter()

    def add_one(self) -> None:
        """A request more, a few steps, and whatever else may happen."""
        chance, machine = self._chance, self.machine
        kind = chance.choice(["local", "local", "hold", "remote", "resumed"])
        self._ends_at[f"r{machine.num_requests}"] = self._num_steps + chance.randint(0, 12)
        machine.add(chance.randint(1, 12), chance.randint(3, 4), 8, kind)
        for _ in range(chance.randint(1, 2)):
            machine.step()
            self._num_steps += 1
            if machine.wanted and chance.random() < 0.3:
                machine.answer_remote(chance.randrange(50), chance.random() < 0.5)
            if machine.held and chance.random() < 0.5:
                machine.release_hold(chance.randrange(50))
            self._abort_those_due()
        machine.every_block_has_its_owners_and_no_others()
        machine.the_tables_hold_what_the_caller_knows()
        machine.what_can_be_found_was_computed()

    def _abort_those_due(self) -> None:
        live = self.machine.live
        for request_id in [one for one in live if self._ends_at[one] <= self._num_steps]:
            self.states[live[request_id].status] += 1
            self.machine.abort(sorted(live).index(request_id))
            assert not self.machine.engine.abort(request_id)


async def test_five_hundred_requests_aborted_in_all_states_leave_nothing_in_redis_either() -> None:
    # KV-16
    storm = Storm(16)
    machine = storm.machine
    with running_valkey() as server:
        redis = connect_redis(f"redis://127.0.0.1:{server.port}/0", timeout_s=20)
        publisher = BlockPublisher(BlockIndex(redis), "m", "w", "1", gather_s=0)
        async with publisher:

            def announce(events: BlockEvents) -> None:
                machine.learn(events)
                publisher.offer(events)

            machine.engine.on_block_events = announce
            for _ in range(500):
                storm.add_one()
                await asyncio.sleep(0)
            for request_id in [f"r{number}" for number in range(500)]:
                # Those that are over are not there to be aborted.
                assert machine.engine.abort(request_id) == (request_id in machine.live)
                machine.live.pop(request_id, None)
            machine.teardown()

            held = {key.hex().encode() for key in machine.findable}
            async with asyncio.timeout(20):
                # Redis is polled.
                while await redis.smembers("mesh:{m}:held:w@1#device") != held:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        assert await redis.keys("mesh:{m}:held:*") == []
        assert await redis.keys("mesh:{m}:block:*") == []
        await redis.aclose()
    assert held
    assert not machine.engine._table.requests
    assert set(machine.engine._pool._num_owners) == {0}
    assert set(storm.states) == set(RequestStatus) - {RequestStatus.FINISHED}
    assert sum(storm.states.values()) > 250
