"""Requests come, wait, move, fail and are aborted at random; every block comes back."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_pool import BlockEvents
from engine.config import SpeculationLimits
from engine.layered_prefill import LayeredPrefill
from engine.request import EngineEvent, RemoteKvWanted, Request, RequestFailed, TokenOutput
from engine.sampling import SamplingParams
from tests.fakes import FakeClock, MemoryRunner, make_engine, naive_generate

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
        assert answer(request_id) == (request_id in self.live)
        assert not answer(request_id)

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
                *(request.block_ids for request in engine._requests.values()),
                *engine._held.values(),
                *engine._quarantined.values(),
            )
            for block_id in block_ids
        )
        owners = engine._pool._num_owners
        assert all(owners[block_id] == owned[block_id] for block_id in range(NUM_BLOCKS))
        assert engine.load().num_free_blocks == NUM_BLOCKS - len(owned)

    @invariant()
    def the_tables_hold_what_the_caller_knows(self) -> None:
        assert set(self.engine._requests) == set(self.live)
        assert set(self.engine._held) == self.held
        assert set(self.engine._quarantined) == set(self.wanted) - set(self.live)

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


EngineMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_every_block_comes_back = EngineMachine.TestCase
