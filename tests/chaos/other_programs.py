"""How much of this machine's processors other programs take while we measure."""

import contextlib
import os

import psutil


def num_processors() -> int:
    return len(os.sched_getaffinity(0))


class OtherPrograms:
    """Processor time that, from its making on, neither the mesh nor this test took."""

    def __init__(self, supervisor_pid: int) -> None:
        self._supervisor = psutil.Process(supervisor_pid)
        self._busy_s = _busy_s()
        self._own_s = self._take_own_s()

    def elapsed_s(self) -> float:
        own_s = self._take_own_s() - self._own_s
        return max(0.0, _busy_s() - self._busy_s - own_s)

    def _take_own_s(self) -> float:
        """Of the supervisor, of its processes, and of those that it has outlived."""
        ours = [psutil.Process(), self._supervisor, *self._supervisor.children(recursive=True)]
        total_s = 0.0
        for process in ours:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total_s += times.user + times.system
        outlived = self._supervisor.cpu_times()
        return total_s + outlived.children_user + outlived.children_system


def _busy_s() -> float:
    times = psutil.cpu_times()
    stolen_s = getattr(times, "steal", 0.0)
    return float(times.user + times.nice + times.system + times.irq + times.softirq + stolen_s)
