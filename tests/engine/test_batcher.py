"""What runs next, and who gives way."""

import pytest

from engine.batcher import Batch, Batcher
from engine.block_pool import BlockPool
from engine.request import Request, RequestStatus
from engine.sampling import SamplingParams
from tests.fakes import ContentHasher, FakeClock

BLOCK_SIZE = 4


class Bench:
    """A batcher whose steps always succeed."""

    def __init__(
        self,
        num_blocks: int = 100,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, ContentHasher())
        self.batcher = Batcher(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
            clock=FakeClock(),
        )
        self.num_arrivals = 0

    def add(
        self,
        name: str,
        num_prompt_tokens: int,
        *,
        hold_blocks: bool = False,
        remote_kv: bool = False,
        first_token_id: int | None = None,
        num_prompt_logprobs: int | None = None,
    ) -> Request:
        # Different prompts do not share blocks unless a test wants it.
        first = self.num_arrivals + 100 if first_token_id is None else first_token_id
        request = Request(
            name,
            [first] * num_prompt_tokens,
            SamplingParams(100, num_prompt_logprobs=num_prompt_logprobs),
            hold_blocks=hold_blocks,
            remote_kv=remote_kv,
        )
        request.arrive(self.num_arrivals, 0.0)
        self.num_arrivals += 1
        self.batcher.add(request)
        return request

    def step(self) -> Batch:
        batch = self.batcher.pick()
        for item in batch.scheduled:
            request = item.request
            before = request.num_computed_tokens // BLOCK_SIZE
            request.num_computed_tokens += item.num_tokens
            after = request.num_computed_tokens // BLOCK_SIZE
            self.pool.extend_keys(request.block_keys, request.token_ids, request.cache_salt)
            for index in range(before, after):
                self.pool.register(request.block_ids[index], request.block_keys[index])
            if item.samples:
                request.append(7, 0.0)
        return batch

    def schedule(self) -> dict[str, int]:
        """Take a step; how many tokens of each request it computed."""
        return {item.request.request_id: item.num_tokens for item in self.step().scheduled}


def test_a_step_never_exceeds_its_token_budget_and_uses_all_of_it() -> None:
    bench = Bench(max_num_batched_tokens=16)
    for name in ("a", "b", "c"):
        bench.add(name, 10)

    assert bench.schedule() == {"a": 10, "b": 6}
    assert bench.schedule() == {"a": 1, "b": 4, "c": 10}
    assert bench.schedule() == {"a": 1, "b": 1, "c": 1}


def test_a_long_prompt_is_computed_in_chunks() -> None:
    bench = Bench(max_num_batched_tokens=16)
    bench.add("long", 40)

    samples = [bench.step().scheduled[0].samples for _ in range(3)]

    assert samples == [False, False, True]


def test_the_logits_of_scored_prompts_are_bounded_however_large_a_step_is() -> None:
    bench = Bench(num_blocks=300, max_num_batched_tokens=1000)
    for number in range(6):
        bench.add(f"scored {number}", 100, num_prompt_logprobs=0)
    bench.add("other", 200)

    first, second = bench.schedule(), bench.schedule()

    assert list(first.values()) == [64] * 4 + [200]
    assert list(second.values()) == [1] + [36] * 4 + [64, 48]


def test_the_threshold_leaves_room_for_others_beside_a_long_prompt() -> None:
    # KV-18, seen from the short ones.
    bench = Bench(max_num_batched_tokens=16, long_prefill_token_threshold=10)
    bench.add("long", 25)
    bench.add("short", 3)

    assert bench.schedule() == {"long": 10, "short": 3}
    assert bench.schedule() == {"short": 1, "long": 10}


def test_a_long_prompt_leaves_up_to_half_of_a_step_to_a_shorter_one_behind_it() -> None:
    bench = Bench(max_num_batched_tokens=16)
    bench.add("long", 60)
    assert bench.schedule() == {"long": 16}
    bench.add("shorter", 12)
    bench.add("as long", 60)

    assert bench.schedule() == {"long": 8, "shorter": 8}
    assert bench.schedule() == {"long": 12, "shorter": 4}
    assert bench.schedule() == {"long": 15, "shorter": 1}


def test_a_long_prompt_leaves_nothing_to_one_that_there_is_no_room_for() -> None:
    bench = Bench(num_blocks=14)
    bench.add("long", 48)
    # Its two blocks are there, but not one more, in which the other may grow.
    bench.add("short", 8)

    assert bench.schedule() == {"long": 16}
    assert bench.schedule() == {"long": 16}


def test_the_threshold_does_not_slow_down_a_prompt_that_is_alone() -> None:
    bench = Bench(max_num_batched_tokens=16, long_prefill_token_threshold=10)
    bench.add("long", 40)

    assert bench.schedule() == {"long": 16}
    bench.add("short", 3)
    assert bench.schedule() == {"long": 10, "short": 3}


def test_decodes_come_before_prompts_that_are_older() -> None:
    # KV-17
    bench = Bench(max_num_batched_tokens=8, max_num_seqs=8)
    bench.add("long", 100)
    remote = bench.add("remote", 9, remote_kv=True)
    bench.step()
    bench.step()
    assert remote.status is RequestStatus.WAITING_FOR_REMOTE_KVS

    bench.batcher.remove(remote)
    remote.num_computed_tokens = remote.num_tokens - 1
    bench.batcher.start_running(remote)

    assert bench.schedule() == {"remote": 1, "long": 7}


def test_a_running_stream_gets_a_token_in_every_step_whatever_arrives() -> None:
    # KV-17
    bench = Bench(num_blocks=400, max_num_batched_tokens=16)
    bench.add("stream", 4)
    bench.step()

    for number in range(50):
        if number % 5 == 0:
            bench.add(f"long {number}", 100)
        assert bench.schedule()["stream"] == 1


def test_requests_start_in_order_of_arrival_and_are_not_overtaken() -> None:
    bench = Bench(num_blocks=10, max_num_batched_tokens=64)
    bench.add("first", 20)
    bench.add("large", 24)
    bench.add("small", 4)

    assert bench.schedule() == {"first": 20}
    assert bench.schedule() == {"first": 1}
    assert [request.request_id for request in bench.batcher.waiting] == ["large", "small"]


def test_a_long_prompt_is_not_starved_by_a_flow_of_short_ones() -> None:
    # KV-18: it starts as soon as what was there before it has ended.
    bench = Bench(num_blocks=30, max_num_batched_tokens=32, max_num_seqs=4)
    short = [bench.add(f"short {number}", 20) for number in range(4)]
    bench.step()
    long = bench.add("long", 80)
    for number in range(10):
        bench.add(f"later {number}", 20)

    num_finished = 0
    while long.status is RequestStatus.WAITING:
        finished = short[num_finished]
        bench.batcher.remove(finished)
        bench.pool.release(finished.block_ids)
        num_finished += 1
        bench.step()

    assert num_finished <= 4
    assert not any(request.request_id.startswith("later") for request in bench.batcher.running)


def test_no_more_requests_run_than_there_are_seats() -> None:
    bench = Bench(max_num_seqs=2, max_num_batched_tokens=16)
    for name in ("a", "b", "c"):
        bench.add(name, 2)

    assert set(bench.schedule()) == {"a", "b"}
    assert set(bench.schedule()) == {"a", "b"}


def test_waiting_for_remote_kv_takes_a_seat_and_no_budget() -> None:
    bench = Bench(max_num_seqs=2, max_num_batched_tokens=4)
    bench.add("local", 10)
    bench.add("remote", 30, remote_kv=True)
    bench.add("late", 2)

    batch = bench.step()

    assert [item.request.request_id for item in batch.scheduled] == ["local"]
    assert [request.request_id for request in batch.remote_kv_wanted] == ["remote"]
    assert [request.request_id for request in bench.batcher.waiting] == ["late"]


def test_cached_blocks_are_not_computed_but_the_last_token_always_is() -> None:
    # KV-05
    bench = Bench(max_num_batched_tokens=16)
    bench.add("cold", 8, first_token_id=5)
    bench.step()

    for num_tokens, num_cached in ((3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)):
        request = bench.add(f"warm {num_tokens}", num_tokens, first_token_id=5)
        scheduled = bench.schedule()
        assert request.num_cached_tokens == num_cached
        assert scheduled[request.request_id] == num_tokens - num_cached
        bench.batcher.remove(request)
        bench.pool.release(request.block_ids)


def test_blocks_are_found_only_after_they_were_computed() -> None:
    # KV-07: two requests with the same prompt in one step compute it twice.
    bench = Bench(max_num_batched_tokens=32)
    first = bench.add("first", 9, first_token_id=5)
    second = bench.add("second", 9, first_token_id=5)

    assert bench.schedule() == {"first": 9, "second": 9}
    assert not set(first.block_ids) & set(second.block_ids)


def test_the_request_that_loses_least_is_preempted() -> None:
    bench = Bench(num_blocks=12, max_num_batched_tokens=64)
    bench.add("long", 20)
    bench.add("short", 8)
    bench.add("middle", 12)
    bench.step()

    batches = [bench.step()]
    while not batches[-1].preempted:
        batches.append(bench.step())

    assert [request.request_id for request in batches[-1].preempted] == ["short"]
    assert {item.request.request_id for item in batches[-1].scheduled} == {"long", "middle"}


def test_blocks_shared_with_others_cost_nothing_to_lose() -> None:
    bench = Bench(num_blocks=10, max_num_batched_tokens=64)
    alone = bench.add("alone", 8)
    bench.add("sharer", 13, first_token_id=5)
    bench.step()
    bench.add("other sharer", 13, first_token_id=5)

    preempted: list[Request] = []
    while not preempted:
        preempted = bench.step().preempted

    # Its 14 tokens are more than the 9 or so of "alone", but 12 of them stay.
    assert [request.request_id for request in preempted] == ["other sharer"]
    assert alone.status is RequestStatus.RUNNING


def test_a_preempted_request_resumes_before_new_ones_and_nothing_starts_meanwhile() -> None:
    bench = Bench(num_blocks=5, max_num_batched_tokens=32)
    old = bench.add("old", 8)
    young = bench.add("young", 6)
    bench.step()
    assert young.status is RequestStatus.RUNNING
    new = bench.add("new", 2)

    while young.status is RequestStatus.RUNNING:
        bench.step()
    assert bench.batcher.waiting == [young, new]
    bench.step()
    assert bench.batcher.waiting == [young, new]

    bench.batcher.remove(old)
    bench.pool.release(old.block_ids)
    bench.step()
    assert bench.batcher.running[0] is young


def test_a_newcomer_waits_unless_running_requests_can_still_grow() -> None:
    bench = Bench(num_blocks=5, max_num_batched_tokens=32)
    bench.add("running", 8)
    bench.step()
    bench.add("newcomer", 8)

    bench.step()
    assert len(bench.batcher.running) == 1


def test_requests_that_end_after_one_token_need_no_room_to_grow() -> None:
    bench = Bench(num_blocks=4, max_num_batched_tokens=4, max_num_seqs=2)
    bench.add("prefill", 8, hold_blocks=True)
    bench.step()
    bench.add("another", 8, hold_blocks=True)

    assert bench.schedule() == {"prefill": 4}
    bench.batcher.remove(bench.batcher.running[0])
    assert bench.schedule() == {"another": 4}


def test_recomputed_tokens_are_those_that_the_cache_lost() -> None:
    bench = Bench(num_blocks=5, max_num_batched_tokens=32)
    old = bench.add("old", 8)
    young = bench.add("young", 6)
    bench.step()
    while young.status is RequestStatus.RUNNING:
        bench.step()
    assert bench.batcher.num_preemptions == 1
    assert young.num_lost_tokens == 8
    # This takes the second of the two blocks that the young one left behind.
    while len(old.block_ids) < 4:
        bench.step()

    bench.batcher.remove(old)
    bench.pool.release(old.block_ids)
    bench.step()

    assert bench.batcher.num_recomputed_tokens == 4


def test_a_budget_that_cannot_serve_all_decodes_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens 7 is below max_num_seqs 8"):
        Bench(max_num_seqs=8, max_num_batched_tokens=7)
