"""Long prompts that are computed some layers at a time beside decodes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from engine.batcher import ScheduledRequest
from engine.engine import Engine
from engine.layered_prefill import LayeredPrefill
from engine.reports import StepReport
from engine.request import Request, TokenOutput
from engine.sampling import SamplingParams
from tests.fakes import (
    FakeClock,
    MemoryPass,
    MemoryRunner,
    make_engine,
    naive_generate,
    run_to_end,
    run_until_stalled,
    token_ids_of,
)

VOCAB_SIZE = 40
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


class Bench:
    """An engine whose passes have four layers of a second each."""

    def __init__(self, objective_s: float = 1.0, num_blocks: int = 64) -> None:
        self.clock = FakeClock()
        self.runner = MemoryRunner(num_blocks, 4)
        self.runner.clock = self.clock
        self.engine = make_engine(
            num_blocks,
            runner=self.runner,
            max_num_batched_tokens=40,
            layered=LayeredPrefill(self.runner.begin, objective_s, few_tokens=2, clock=self.clock),
            clock=self.clock,
        )

    def step(self) -> list[str]:
        """Whose tokens a step brought."""
        return [e.request_id for e in self.engine.step() if isinstance(e, TokenOutput)]

    def start(self, *request_ids: str) -> None:
        """Let requests decode."""
        for request_id in request_ids:
            self.engine.add_request(short(request_id))
        assert self.step() == list(request_ids)


def short(request_id: str) -> Request:
    return Request(request_id, [5, int(request_id[1:]) + 3], GREEDY)


def long(request_id: str, length: int = 40, max_tokens: int = 3, token: int = 7) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(request_id, [token] * length, params)


def assert_nothing_is_taken(engine: Engine) -> None:
    load = engine.load()
    assert load.num_free_blocks == load.num_blocks


def test_decodes_get_a_token_in_every_step_of_a_long_prompt() -> None:
    bench = Bench(objective_s=1.0)
    bench.start("s0", "s1")
    bench.engine.add_request(long("long", 38))

    tokens = [bench.step() for _ in range(5)]

    # Each of them and the one that let the requests in, whatever was computed apart in it.
    assert bench.engine.load().num_steps == 6
    assert [sorted(step) for step in tokens[:3]] == [["s0", "s1"]] * 3
    assert sorted(tokens[3]) == ["long", "s0", "s1"]
    assert sorted(tokens[4]) == ["long", "s0", "s1"]


def test_a_step_computes_as_many_layers_as_its_time_allows() -> None:
    bench = Bench(objective_s=2.0)
    bench.start("s0")
    bench.engine.add_request(long("long", 39))

    tokens = [bench.step() for _ in range(2)]

    assert tokens == [["s0"], ["long", "s0"]]


def test_a_prompt_without_decodes_is_computed_at_once() -> None:
    bench = Bench()
    bench.engine.add_request(long("long", 40))

    assert bench.step() == ["long"]
    assert bench.clock.now == 100.0, "not in parts"


def test_when_the_last_decode_ends_the_rest_of_a_pass_is_computed_at_once() -> None:
    bench = Bench()
    bench.start("s0")
    bench.engine.add_request(long("long", 39))
    bench.step()
    bench.engine.abort("s0")

    assert bench.step() == ["long"]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    # A token takes a tenth of a second: five of them may go with the decodes.
    bench = Bench(objective_s=1.0)
    bench.start("s0")
    bench.engine.add_request(long("long", 40 - 1))
    bench.step()
    bench.engine.add_request(short("s1"))

    assert sorted(bench.step()) == ["s0", "s1"]


def test_that_a_long_context_is_slow_does_not_keep_short_prompts_waiting() -> None:
    bench = Bench(objective_s=1.0)
    bench.start("s0")
    bench.engine.add_request(long("long", 39))
    bench.step()
    bench.runner.layer_s = 5.0
    bench.step()
    bench.engine.add_request(short("s1"))

    assert sorted(bench.step()) == ["s0", "s1"]


def measured(context_s: float = 0.0) -> Bench:
    """One that has seen a pass: a token takes four seconds by 39. "s0" decodes.

    Twenty-four tokens and no more take two and a half objectives.
    """
    bench = Bench(objective_s=1.0)
    bench.start("s0")
    bench.engine.add_request(long("before", 39, max_tokens=1))
    while "before" not in bench.step():
        pass
    assert bench.engine._layered is not None
    bench.engine._layered._context_s = context_s
    return bench


def test_a_whole_prompt_of_two_and_a_half_objectives_goes_with_the_decodes() -> None:
    bench = measured()
    bench.engine.add_request(long("short", 24, token=9))
    assert sorted(bench.step()) == ["s0", "short"]

    bench.engine.add_request(long("longer", 25, token=11))

    assert "longer" not in bench.step()


def test_prompts_that_do_not_fit_beside_the_decodes_together_go_one_after_the_other() -> None:
    bench = measured()
    for request_id, length, token in (("a", 16, 9), ("b", 14, 11), ("c", 8, 13)):
        bench.engine.add_request(long(request_id, length, max_tokens=1, token=token))

    assert [sorted(bench.step()) for _ in range(2)] == [["a", "c", "s0"], ["b", "s0"]]


def test_prompts_beside_the_decodes_do_not_keep_a_long_one_from_beginning() -> None:
    bench = measured()
    bench.engine.add_request(long("long", 26, max_tokens=1, token=9))
    bench.engine.add_request(long("short", 8, max_tokens=1, token=11))

    assert [sorted(bench.step()) for _ in range(5)] == [
        ["s0", "short"],
        ["s0"],
        ["s0"],
        ["s0"],
        ["long", "s0"],
    ]


def test_a_short_prompt_goes_with_the_decodes_while_a_long_one_is_under_way() -> None:
    bench = measured()
    bench.engine.add_request(long("long", 190, max_tokens=1, token=9))
    for _ in range(15):  # its later parts look at much, and take no longer for that here
        assert bench.step() == ["s0"]

    bench.engine.add_request(long("short", 24, max_tokens=1, token=11))

    assert sorted(bench.step()) == ["s0", "short"]


def test_prompts_beside_a_long_one_that_is_under_way_go_in_order_of_arrival() -> None:
    bench = measured()
    bench.engine.add_request(long("long", 36, max_tokens=1, token=9))
    bench.step()
    for request_id, length, token in (("a", 16, 11), ("b", 15, 13), ("c", 8, 15)):
        bench.engine.add_request(long(request_id, length, max_tokens=1, token=token))

    assert [sorted(bench.step()) for _ in range(2)] == [["a", "c", "s0"], ["b", "s0"]]


def test_a_flow_of_short_prompts_does_not_starve_a_long_one() -> None:
    # KV-18
    bench = measured()
    bench.engine.add_request(long("long", 36, max_tokens=1, token=9))
    bench.step()

    tokens: list[str] = []
    for number in range(8):
        bench.engine.add_request(long(f"short {number}", 3, max_tokens=1, token=11 + number))
        step = bench.step()
        assert f"short {number}" in step
        tokens += step

    assert "long" in tokens


def test_a_prompt_that_looks_at_much_does_not_go_with_the_decodes() -> None:
    # Its tokens have seven before them on average.
    bench = measured(context_s=0.02)
    bench.engine.add_request(long("short", 14, token=9))

    assert bench.step() == ["s0"]


def test_pieces_of_a_long_prompt_do_not_go_with_the_decodes() -> None:
    bench = measured()
    bench.engine.add_request(long("long", 51, token=9))
    for _ in range(4):
        assert "long" not in bench.step()

    # Twelve tokens are left.
    assert "long" not in bench.step()


def test_prompts_in_parts_give_the_tokens_of_prompts_at_once() -> None:
    requests = [short("s0"), short("s1"), long("a", 90), long("b", 61), short("s2")]
    expected = {
        r.request_id: naive_generate(r.prompt_token_ids, r.sampling_params, VOCAB_SIZE, 200)
        for r in requests
    }
    bench = Bench()
    bench.start("s0", "s1")

    outputs = run_to_end(bench.engine, *requests[2:])

    for request_id in ("a", "b", "s2"):
        assert token_ids_of(outputs[request_id]) == expected[request_id]
    for request_id in ("s0", "s1"):
        tail = token_ids_of(outputs[request_id])
        assert tail == expected[request_id][-len(tail) :]


def test_blocks_of_an_aborted_prompt_are_not_written_to_any_more() -> None:
    bench = Bench(num_blocks=16)
    bench.start("s0")
    bench.engine.add_request(long("gone", 39))
    bench.step()

    bench.engine.abort("gone")
    heir = Request("heir", [9] * 35, GREEDY)
    outputs = run_to_end(bench.engine, heir)

    expected = naive_generate(heir.prompt_token_ids, GREEDY, VOCAB_SIZE, 64)
    assert token_ids_of(outputs["heir"]) == expected[: len(outputs["heir"])]
    assert_nothing_is_taken(bench.engine)


def test_a_prompt_that_is_preempted_half_way_starts_over() -> None:
    bench = Bench(num_blocks=11)
    bench.start("s0")
    bench.engine.add_request(long("long", 39))
    first_steps = [bench.step() for _ in range(3)]

    outputs = [e for e in run_until_stalled(bench.engine) if isinstance(e, TokenOutput)]

    assert ["long"] not in first_steps
    tokens = token_ids_of([e for e in outputs if e.request_id == "long"])
    assert tokens == naive_generate([7] * 39, long("long").sampling_params, VOCAB_SIZE, 44)
    assert_nothing_is_taken(bench.engine)


def test_a_report_counts_the_tokens_of_a_pass_in_the_step_that_ends_it() -> None:
    bench, reports = Bench(), list[StepReport]()
    bench.start("s0")
    bench.engine.on_step = reports.append
    bench.engine.add_request(long("long", 39))

    for _ in range(4):
        bench.step()

    assert [report.num_tokens for report in reports] == [1, 1, 1, 40]
    assert all(set(report.request_ids) == {"s0", "long"} for report in reports)


@pytest.mark.parametrize("is_layered", [True, False])
def test_gaps_of_a_stream_are_bounded_whatever_long_prompts_arrive(is_layered: bool) -> None:
    # KV-17: a chunk of 256 tokens takes 102 ms, a quarter of that in each layer.
    token_s, step_s, objective_s = 0.0004, 0.005, 0.025
    clock, num_blocks = FakeClock(), 800
    runner, apart = SteadyRunner(num_blocks, 16, clock, step_s, token_s), MemoryRunner(1, 16)
    apart.memory, apart.clock = runner.memory, clock

    def begin(scheduled: Sequence[ScheduledRequest]) -> MemoryPass:
        apart.layer_s = sum(item.num_tokens for item in scheduled) * token_s / 4
        return apart.begin(scheduled)

    layered = LayeredPrefill(begin, objective_s, clock=clock) if is_layered else None
    engine = make_engine(
        num_blocks,
        16,
        runner=runner,
        max_num_batched_tokens=256,
        max_model_len=8192,
        layered=layered,
        clock=clock,
    )
    engine.add_request(Request("stream", [5, 7], replace(GREEDY, max_tokens=2000)))
    engine.step()
    waiting = [long("6000", 6000, max_tokens=1, token=9)]
    waiting += [long(f"2000 {n}", 2000, max_tokens=1, token=11 + n) for n in range(6)]
    unfinished = {request.request_id for request in waiting}
    last, gaps = clock.now, list[float]()

    while unfinished:
        # A flow of them: somewhat more than are computed beside the stream.
        if waiting and clock.now >= 100 + (7 - len(waiting)) * 0.8:
            engine.add_request(waiting.pop(0))
        tokens = [e.request_id for e in engine.step() if isinstance(e, TokenOutput)]
        unfinished -= set(tokens)
        if "stream" in tokens:
            gaps.append(clock.now - last)
            last = clock.now

    layer_s, chunk_s = 256 * token_s / 4, step_s + 256 * token_s
    assert max(gaps) <= (objective_s + layer_s if is_layered else chunk_s) + 1e-9
    assert len(gaps) > 20


class SteadyRunner(MemoryRunner):
    """A step takes so long, and each of its tokens so long more."""

    def __init__(
        self, num_blocks: int, block_size: int, clock: FakeClock, step_s: float, token_s: float
    ) -> None:
        super().__init__(num_blocks, block_size)
        self._clock, self._step_s, self._token_s = clock, step_s, token_s

    def execute(
        self,
        scheduled: Sequence[ScheduledRequest],
        on_kv_written: Callable[[], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        num_rows = sum(item.num_rows for item in scheduled)
        self._clock.advance(self._step_s + num_rows * self._token_s)
        return super().execute(scheduled, on_kv_written)
