"""One cell of the chaos matrix: a role, a fault and the stage in which it strikes."""

import asyncio
import itertools
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from mesh.home import ServiceRecord
from tests.chaos.other_programs import OtherPrograms, num_processors
from tests.chaos.probe import MeshProbe, signal_service
from tests.chaos.streams import NUM_STREAMS, Answer, Streams


class Fault(StrEnum):
    """What happens to the victim."""

    SIGKILL = "SIGKILL"
    SIGSTOP = "SIGSTOP"
    RESTART = "restart"


class Stage(StrEnum):
    """What at least some of the streams are doing at that moment."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"


ROLES = ("gateway", "tokenizer", "scheduler", "prefill", "decode", "kv_transfer", "redis")

# More than the 6 s after which a silent peer is given up.
SHORT_FREEZE_S = 8.0
LONG_FREEZE_S = 20.0
MAX_EXTRA_WAIT_S = 10.0
CLEAN_WITHIN_S = 5.0
_MAX_ROUNDS = 3
_WHOLE_WITHIN_S = 60.0
_salts = itertools.count()


@dataclass(frozen=True)
class Cell:
    """Strikes the last process of `role`, which is the only one of Redis."""

    role: str
    fault: Fault
    stage: Stage
    freeze_s: float = LONG_FREEZE_S

    def __str__(self) -> str:
        return f"{self.role}-{self.fault}-{self.stage}"


MATRIX = [Cell(*one) for one in itertools.product(ROLES, Fault, Stage)]


@dataclass(frozen=True)
class Expected:
    """What the streams answer when nothing happens, and when the last of them is complete."""

    answers: list[Answer]
    slowest_s: float


async def undisturbed(probe: MeshProbe) -> Expected:
    """Of a mesh that has warmed up."""
    for _ in range(2):
        answers = await Streams(gateway_urls(probe), f"undisturbed-{next(_salts)}").run()
        assert [answer.error for answer in answers if answer.error is not None] == []
    return Expected(answers, max(answer.duration_s for answer in answers))


async def run_cell(cell: Cell, probe: MeshProbe, expected: Expected) -> list[str]:
    """Everything that went wrong."""
    victim = probe.services(cell.role)[-1]
    for _ in range(_MAX_ROUNDS):
        streams = Streams(gateway_urls(probe), f"{cell}-{next(_salts)}")
        others = OtherPrograms(probe.supervisor_pid)
        running = asyncio.create_task(streams.run())
        if await _reached(cell, victim.name, probe, streams, running):
            break
        await running
    else:
        return [f"no stream was seen {cell.stage} in {_MAX_ROUNDS} rounds"]
    striking = asyncio.create_task(_strike(cell, victim))
    excused = _excused(cell, victim, streams)
    await streams.wait_for(set(range(NUM_STREAMS)) - excused)
    others_s = others.elapsed_s()
    answers = await running
    problems = _differences(cell, excused, answers, expected.answers)
    if cell.fault is not Fault.SIGSTOP:
        left = await probe.wait_until_clean(CLEAN_WITHIN_S, but_for={victim.name})
        problems += [f"{name} still holds {held}" for name, held in left.items()]
    # What a frozen process holds can be seen, and given back, only afterwards.
    await striking
    if cell.fault is Fault.SIGSTOP:
        left = await probe.wait_until_clean(CLEAN_WITHIN_S)
        problems += [f"{name} still holds {held} after all" for name, held in left.items()]
    started = time.monotonic()
    missing = await probe.wait_until_whole(_WHOLE_WITHIN_S, replaced=_replaced(cell, victim))
    problems += [f"{name} is not back: {why}" for name, why in missing.items()]
    left = await probe.wait_until_clean(CLEAN_WITHIN_S)
    problems += [f"{name} came back with {held}" for name, held in left.items()]
    print(f"{cell}: whole again after {time.monotonic() - started:.1f} s")
    waits = [answer.duration_s for n, answer in enumerate(answers) if n not in excused]
    return problems + _delays(cell, max(waits), expected.slowest_s, others_s)


def _replaced(cell: Cell, victim: ServiceRecord) -> ServiceRecord | None:
    return None if cell.fault is Fault.SIGSTOP else victim


def gateway_urls(probe: MeshProbe) -> list[str]:
    return [f"http://{one.address}" for one in probe.services("gateway")]


async def _strike(cell: Cell, victim: ServiceRecord) -> None:
    """Returns when the victim may be itself again."""
    match cell.fault:
        case Fault.SIGKILL:
            signal_service(victim, signal.SIGKILL)
        case Fault.RESTART:
            signal_service(victim, signal.SIGTERM)
        case Fault.SIGSTOP:
            signal_service(victim, signal.SIGSTOP)
            try:
                await asyncio.sleep(cell.freeze_s)
            finally:
                signal_service(victim, signal.SIGCONT)


def _excused(cell: Cell, victim: ServiceRecord, streams: Streams) -> set[int]:
    """A dead gateway takes its streams with it, and a frozen one delays them."""
    if cell.role != "gateway":
        return set()
    return streams.numbers_at(f"http://{victim.address}")


def _differences(
    cell: Cell, excused: set[int], answers: list[Answer], expected: list[Answer]
) -> list[str]:
    problems = []
    for number, (answer, should) in enumerate(zip(answers, expected, strict=True)):
        if number in excused and cell.fault is not Fault.SIGSTOP:
            continue
        if difference := answer.differs_from(should):
            problems.append(f"stream {number}: {difference}")
    return problems


def _delays(cell: Cell, longest_s: float, undisturbed_s: float, others_s: float) -> list[str]:
    """Who waited too long. Whenever something of ours waits for a processor, all of them are busy:
    other programs delay nobody by more than the time they took, shared by the processors."""
    bound_s = undisturbed_s + MAX_EXTRA_WAIT_S + others_s / num_processors()
    told = (
        f"{longest_s:.1f} s, undisturbed {undisturbed_s:.1f} s, bound {bound_s:.1f} s "
        f"with {others_s:.1f} s of processors for other programs"
    )
    print(f"{cell}: {told}")
    return [] if longest_s <= bound_s else [f"a client waited {told}"]


async def _reached(
    cell: Cell,
    victim: str,
    probe: MeshProbe,
    streams: Streams,
    running: "asyncio.Task[list[Answer]]",
) -> bool:
    """Wait for the stage, in the victim if it is one of its own."""
    is_so = _STAGES[cell.stage]
    while not running.done():
        if await is_so(cell, victim, probe, streams):
            return True
    return False


async def _is_queued(cell: Cell, victim: str, probe: MeshProbe, streams: Streams) -> bool:
    return await probe.num_waiting() > 0


async def _is_prefilling(cell: Cell, victim: str, probe: MeshProbe, streams: Streams) -> bool:
    loads = await probe.loads("prefill")
    names = [victim] if cell.role == "prefill" else list(loads)
    return any(loads[name].num_running > 0 for name in names)


async def _is_transferring(cell: Cell, victim: str, probe: MeshProbe, streams: Streams) -> bool:
    """A lease begins with a long prompt's first chunk and ends when its last block is read."""
    leased, decoding = await asyncio.gather(probe.loads("prefill"), probe.loads("decode"))
    names = [victim] if cell.role == "prefill" else list(leased)
    if cell.role == "decode" and decoding[victim].num_waiting == 0:
        return False
    return any(leased[name].num_leases > 0 for name in names)


async def _is_decoding(cell: Cell, victim: str, probe: MeshProbe, streams: Streams) -> bool:
    loads = await probe.loads("decode")
    names = [victim] if cell.role == "decode" else list(loads)
    if not any(loads[name].num_running > 0 for name in names):
        return False
    return sum(count >= 5 for count in streams.num_deltas) >= 2


_Check = Callable[[Cell, str, MeshProbe, Streams], Awaitable[bool]]
_STAGES: dict[Stage, _Check] = {
    Stage.QUEUED: _is_queued,
    Stage.PREFILLING: _is_prefilling,
    Stage.TRANSFERRING: _is_transferring,
    Stage.DECODING: _is_decoding,
}
