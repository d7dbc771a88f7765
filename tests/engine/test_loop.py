"""The engine in its thread, as an asyncio caller sees it."""

import asyncio
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest

from engine.batcher import ScheduledRequest
from engine.block_pool import BlockEvents
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.request import (
    DuplicateRequest,
    EngineStopped,
    InvalidLogits,
    InvalidParameter,
    PrefillProgress,
    RemoteKvWanted,
    Request,
    TokenOutput,
    TooManyWaiting,
)
from engine.sampling import SamplingParams
from tests.fakes import FakeClock, Logits, MemoryRunner, make_engine, naive_generate

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
ENDLESS = SamplingParams(max_tokens=190, temperature=0.0, ignore_eos=True)
PROMPT = [5, 9, 13, 21, 7]


class GatedRunner(MemoryRunner):
    """Takes a step only when it is let; tells when it has begun one."""

    def __init__(self) -> None:
        super().__init__(64, 4)
        self.is_gated = True
        self.begun = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)

    def execute(
        self,
        scheduled: Sequence[ScheduledRequest],
        on_kv_written: Callable[[], None] | None = None,
    ) -> Logits:
        if self.is_gated:
            self.begun.release()
            assert self._permits.acquire(timeout=20)
        return super().execute(scheduled, on_kv_written)

    def let(self, num_steps: int) -> None:
        self._permits.release(num_steps)

    def open(self) -> None:
        self.is_gated = False
        self.let(1)

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=20)


@asynccontextmanager
async def running(
    engine: Engine,
    on_block_events: Callable[[BlockEvents], None] | None = None,
    clock: FakeClock | None = None,
) -> AsyncIterator[EngineLoop]:
    loop = EngineLoop(engine, on_block_events, clock or FakeClock())
    loop.start()
    try:
        yield loop
    finally:
        await loop.stop()


async def tokens_of(loop: EngineLoop, request: Request) -> list[int]:
    async with aclosing(loop.generate(request)) as events:
        return [event.token_id async for event in events if isinstance(event, TokenOutput)]


async def is_idle(loop: EngineLoop) -> None:
    """Wait until the engine has nothing left; every step and command makes a new snapshot."""
    async with asyncio.timeout(20):
        while True:
            load = loop.load()
            if load.num_free_blocks == load.num_blocks and not load.num_running + load.num_waiting:
                return
            # A request of one token comes back after all commands given before it.
            one = Request("probe", [39, 38, 37], SamplingParams(1, temperature=0.0))
            await tokens_of(loop, one)


async def test_requests_stream_their_tokens_side_by_side() -> None:
    async with running(make_engine()) as loop:
        requests = [Request(f"r{i}", [*PROMPT, i + 3], GREEDY) for i in range(6)]

        outputs = await asyncio.gather(*(tokens_of(loop, request) for request in requests))

        assert outputs == [naive_generate([*PROMPT, i + 3], GREEDY) for i in range(6)]
        await is_idle(loop)


async def test_tokens_arrive_while_the_request_goes_on() -> None:
    runner = GatedRunner()
    async with running(make_engine(runner=runner)) as loop:
        events = loop.generate(Request("r", PROMPT, GREEDY))
        runner.let(1)

        first = await anext(events)

        assert isinstance(first, TokenOutput)
        assert not first.is_last
        runner.open()
        await events.aclose()


async def test_a_step_calls_the_event_loop_once_however_many_tokens_it_brings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False)
    asyncio_loop = asyncio.get_running_loop()
    callbacks: list[str] = []
    call = asyncio_loop.call_soon_threadsafe

    def counting(callback: Callable[..., object], *args: object, **kwargs: object) -> object:
        callbacks.append(callback.__qualname__)
        return call(callback, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio_loop, "call_soon_threadsafe", counting)
    async with running(engine) as loop:
        requests = [Request(f"r{i}", [*PROMPT, i + 3], ENDLESS) for i in range(8)]
        await asyncio.gather(*(tokens_of(loop, request) for request in requests))

        num_steps = loop.load().num_steps
        assert callbacks.count("EngineLoop._deliver") == num_steps
        assert num_steps < 8 * 190


async def test_health_and_load_answer_during_a_long_step() -> None:
    runner, clock = GatedRunner(), FakeClock()
    async with running(make_engine(runner=runner, clock=clock), clock=clock) as loop:
        assert loop.last_step_age_s == 0.0
        task = asyncio.create_task(tokens_of(loop, Request("r", PROMPT, GREEDY)))
        await runner.has_begun()

        clock.advance(2.0)
        assert loop.last_step_age_s == 2.0
        assert loop.load().num_blocks == 64
        clock.advance(3.0)
        assert loop.last_step_age_s == 5.0
        assert loop.is_running

        runner.let(1)
        await runner.has_begun()
        assert loop.last_step_age_s == 0.0
        runner.open()
        await task
        await is_idle(loop)
        clock.advance(1000.0)
        assert loop.last_step_age_s == 0.0


async def test_closing_a_stream_aborts_its_request_at_the_next_step() -> None:
    runner = GatedRunner()
    async with running(make_engine(runner=runner, max_num_batched_tokens=64)) as loop:
        streams = [loop.generate(Request(f"r{i}", PROMPT, ENDLESS)) for i in range(2)]
        firsts = asyncio.gather(*map(anext, streams))
        await runner.has_begun()
        # The second request may have missed the first step.
        runner.let(2)
        await firsts
        for _ in range(2):
            await runner.has_begun()

        # One step is under way; the one after it is without the request.
        await streams[0].aclose()
        for _ in range(2):
            runner.let(1)
            await runner.has_begun()

        assert runner.step_sizes[-2:] == [2, 1]
        runner.open()
        await streams[1].aclose()
        await is_idle(loop)


async def test_cancelling_the_consumer_aborts_in_any_state() -> None:
    # KV-16: one request runs, the other has no seat; both wait for their next event.
    runner = GatedRunner()
    async with running(make_engine(runner=runner, max_num_seqs=1)) as loop:
        tasks = [
            asyncio.create_task(tokens_of(loop, Request(f"r{i}", PROMPT, ENDLESS)))
            for i in range(2)
        ]
        await runner.has_begun()

        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)

        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        runner.open()
        await is_idle(loop)


async def test_a_stream_that_is_never_read_costs_nothing() -> None:
    async with running(make_engine()) as loop:
        events = loop.generate(Request("r", PROMPT, ENDLESS))

        await events.aclose()

        await is_idle(loop)
        assert loop.load().num_prefix_cache_queries <= 3


async def test_an_id_can_be_used_again_at_once_and_gets_only_its_own_tokens() -> None:
    runner = GatedRunner()
    async with running(make_engine(runner=runner)) as loop:
        first = loop.generate(Request("r", PROMPT, ENDLESS))
        runner.let(1)
        await anext(first)
        await runner.has_begun()
        await runner.has_begun()

        # The step under way still brings a token of the first request.
        await first.aclose()
        second = asyncio.create_task(tokens_of(loop, Request("r", [3, 4, 5], GREEDY)))
        await asyncio.sleep(0)
        runner.open()

        assert await second == naive_generate([3, 4, 5], GREEDY)
        await is_idle(loop)


async def test_a_refused_id_does_not_disturb_the_request_that_owns_it() -> None:
    # So long that it cannot end before the second one is refused.
    num_tokens = 3000
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    engine = make_engine(num_blocks=1000, max_model_len=4000)
    async with running(engine) as loop:
        events = loop.generate(Request("r", PROMPT, params))
        await anext(events)

        with pytest.raises(DuplicateRequest):
            await tokens_of(loop, Request("r", [3], GREEDY))

        async for _ in events:
            num_tokens -= 1
        assert num_tokens == 1


async def test_what_could_never_be_served_is_refused_without_waiting_for_a_step() -> None:
    runner = GatedRunner()
    async with running(make_engine(runner=runner)) as loop:
        task = asyncio.create_task(tokens_of(loop, Request("r", PROMPT, GREEDY)))
        await runner.has_begun()

        with pytest.raises(InvalidParameter):
            await tokens_of(loop, Request("bad", [-1], GREEDY))

        runner.open()
        await task


async def test_no_more_requests_are_taken_than_may_run_and_wait() -> None:
    runner = GatedRunner()
    async with running(make_engine(runner=runner, max_num_seqs=1, max_num_waiting=2)) as loop:
        tasks = [
            asyncio.create_task(tokens_of(loop, Request(f"r{i}", PROMPT, GREEDY))) for i in range(3)
        ]
        await runner.has_begun()

        with pytest.raises(TooManyWaiting):
            await tokens_of(loop, Request("one too many", PROMPT, GREEDY))

        runner.open()
        await asyncio.gather(*tasks)


async def test_a_failed_request_raises_and_others_go_on() -> None:
    # SA-16
    runner = MemoryRunner(64, 4)
    runner.is_broken = lambda request: request.request_id == "bad" and request.num_tokens > 8
    async with running(make_engine(runner=runner)) as loop:
        good = asyncio.create_task(tokens_of(loop, Request("good", PROMPT, GREEDY)))

        with pytest.raises(InvalidLogits):
            await tokens_of(loop, Request("bad", PROMPT, ENDLESS))

        assert await good == naive_generate(PROMPT, GREEDY)
        await is_idle(loop)


async def test_a_crash_fails_all_requests_and_shows_in_health(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = GatedRunner()

    def crash(request: Request) -> bool:
        raise RuntimeError("out of memory")

    async with running(make_engine(runner=runner, max_num_seqs=1)) as loop:
        tasks = [
            asyncio.create_task(tokens_of(loop, Request(f"r{i}", PROMPT, GREEDY))) for i in range(3)
        ]
        await runner.has_begun()
        runner.is_broken = crash
        runner.open()

        results = await asyncio.gather(*tasks, return_exceptions=True)

        assert all(isinstance(result, EngineStopped) for result in results)
        assert "out of memory" in str(results[0])
        assert not loop.is_running
        assert loop.last_step_age_s == math.inf
        with pytest.raises(EngineStopped, match="out of memory"):
            await tokens_of(loop, Request("late", PROMPT, GREEDY))
        assert [record.levelno for record in caplog.records] == [logging.ERROR]


async def test_a_thread_that_cannot_start_fails_its_requests() -> None:
    def refuse() -> None:
        raise PermissionError("no other priority")

    loop = EngineLoop(make_engine(), on_thread_start=refuse)
    loop.start()

    async with asyncio.timeout(20):
        with pytest.raises(EngineStopped, match="no other priority"):
            await tokens_of(loop, Request("r", PROMPT, GREEDY))
    assert not loop.is_running
    await loop.stop()


async def test_stopping_fails_what_still_runs_and_closes_the_engine() -> None:
    runner = GatedRunner()
    async with running(make_engine(runner=runner)) as loop:
        task = asyncio.create_task(tokens_of(loop, Request("r", PROMPT, ENDLESS)))
        await runner.has_begun()
        stopping = asyncio.create_task(loop.stop())
        await asyncio.sleep(0)
        runner.open()

        with pytest.raises(EngineStopped, match="stopped"):
            await task
        await stopping

        assert runner.is_closed
        assert not loop.is_running


async def test_block_events_come_on_the_event_loop() -> None:
    told: list[tuple[BlockEvents, threading.Thread]] = []
    engine = make_engine()
    async with running(
        engine, lambda events: told.append((events, threading.current_thread()))
    ) as loop:
        await tokens_of(loop, Request("r", PROMPT * 3, SamplingParams(1, temperature=0.0)))

    assert sum(len(events.stored) for events, _ in told) == 3
    assert {thread for _, thread in told} == {threading.current_thread()}


# Blocks that move between workers.


async def test_held_blocks_are_given_back_on_release() -> None:
    async with running(make_engine()) as loop:
        async with aclosing(
            loop.generate(Request("r", PROMPT, GREEDY, hold_blocks=True))
        ) as events:
            [output] = [event async for event in events if isinstance(event, TokenOutput)]
        assert len(output.held_block_ids) == 2

        await tokens_of(loop, Request("probe", [3], SamplingParams(1, temperature=0.0)))
        assert loop.load().num_leases == 1
        loop.release_hold("r")

        await is_idle(loop)
        assert loop.load().num_leases == 0


async def test_held_blocks_that_nobody_was_told_of_are_given_back() -> None:
    runner = GatedRunner()
    async with running(make_engine(runner=runner, max_num_batched_tokens=8)) as loop:
        events = loop.generate(Request("r", PROMPT * 2, GREEDY, hold_blocks=True))
        runner.let(1)
        assert isinstance(await anext(events), PrefillProgress)
        # The step that ends it is under way.
        await runner.has_begun()
        await runner.has_begun()

        await events.aclose()
        runner.open()

        await is_idle(loop)
        assert loop.load().num_leases == 0


async def test_a_request_goes_on_when_its_kv_has_arrived() -> None:
    engine = make_engine()
    expected = naive_generate(PROMPT, GREEDY)
    async with running(engine) as loop:
        events = loop.generate(Request("r", PROMPT, GREEDY, expected[:1], remote_kv=True))
        wanted = await anext(events)
        assert isinstance(wanted, RemoteKvWanted)
        runner = engine._runner
        assert isinstance(runner, MemoryRunner)
        runner.write(wanted.block_ids, 0, PROMPT)

        loop.remote_kv_done("r")

        tokens = [event.token_id async for event in events if isinstance(event, TokenOutput)]
        assert tokens == expected[1:]
        await is_idle(loop)


async def test_a_request_computes_its_prompt_when_its_kv_does_not_come() -> None:
    expected = naive_generate(PROMPT, GREEDY)
    async with running(make_engine()) as loop:
        events = loop.generate(Request("r", PROMPT, GREEDY, expected[:1], remote_kv=True))
        assert isinstance(await anext(events), RemoteKvWanted)

        loop.remote_kv_failed("r")

        tokens = [event.token_id async for event in events if isinstance(event, TokenOutput)]
        assert tokens == expected[1:]


async def test_blocks_of_a_pull_under_way_come_back_only_when_it_has_ended() -> None:
    # KV-21
    async with running(make_engine()) as loop:
        events = loop.generate(Request("r", PROMPT, GREEDY, [7], remote_kv=True))
        await anext(events)
        await events.aclose()
        await tokens_of(loop, Request("probe", [3], SamplingParams(1, temperature=0.0)))
        assert loop.load().num_free_blocks == 62

        loop.remote_kv_done("r")

        await is_idle(loop)


async def test_blocks_of_a_pull_that_nobody_was_told_of_come_back() -> None:
    runner = GatedRunner()
    async with running(make_engine(runner=runner)) as loop:
        busy = asyncio.create_task(tokens_of(loop, Request("busy", PROMPT, GREEDY)))
        await runner.has_begun()
        events = loop.generate(Request("r", PROMPT, GREEDY, [7], remote_kv=True))
        waiting = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        # Its RemoteKvWanted comes with the end of this step.
        runner.let(1)
        await runner.has_begun()

        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        runner.open()

        await busy
        await is_idle(loop)
