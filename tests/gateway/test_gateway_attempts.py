"""How often a choice starts again, and what of it counts."""

import pytest

from gateway.attempts import AttemptLimits, Attempts, WorkerLost
from gateway.generation import Deadline, GenerationRequest, Job, TokenPrompt
from mesh.errors import WorkerUnavailable
from mesh.v1 import scheduler_pb2, types_pb2

LOST = WorkerLost("the connection broke")


def attempts(**limits: float) -> Attempts:
    """Those of a choice that has a token already."""
    params = types_pb2.SamplingParams(max_tokens=9)
    job = Job(
        request_id="r",
        model="m",
        prompt_token_ids=[1],
        sampling_params=params,
        end_token_ids=frozenset(),
        request=GenerationRequest((TokenPrompt((1,)),), params),
        deadline=Deadline(60),
        output_token_ids=[2],
    )
    return Attempts(job, AttemptLimits(**limits))  # type: ignore[arg-type]


def worker(incarnation: str, worker_id: str = "w") -> scheduler_pb2.WorkerRef:
    return scheduler_pb2.WorkerRef(worker_id=worker_id, incarnation=incarnation)


async def test_a_dead_process_counts_once_however_often_it_is_placed_on() -> None:
    tried = attempts(max_attempts=3)
    for process in (worker("1"), worker("1"), worker("1"), worker("2"), worker("2")):
        tried.worker = process
        await tried.after(LOST)

    tried.worker = worker("3")
    with pytest.raises(WorkerLost):
        await tried.after(LOST)


async def test_waiting_for_the_successor_of_a_dead_process_is_bounded() -> None:
    tried = attempts(max_attempts=9, max_wait_s=0.0)
    for _ in range(2):
        tried.worker = worker("1")
        await tried.after(LOST)

    tried.worker = worker("1")
    with pytest.raises(WorkerLost):
        await tried.after(LOST)


async def test_whoever_waits_for_a_successor_may_be_placed_there() -> None:
    tried = attempts()
    tried.worker = worker("1")
    await tried.after(LOST)
    assert tried.excluded_worker_ids == {"w"}

    tried.worker = worker("1")
    await tried.after(LOST)

    assert tried.excluded_worker_ids == set()


async def test_what_a_living_process_says_counts_each_time() -> None:
    tried = attempts(max_attempts=2)
    tried.worker = worker("1")
    await tried.after(WorkerUnavailable("the engine has ended"))

    tried.worker = worker("1")
    with pytest.raises(WorkerUnavailable):
        await tried.after(WorkerUnavailable("the engine has ended"))
