"""Those who answer are let in before those who compute."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.scheduling import compute_behind

SCRIPT = """
import sys, threading
from mesh.scheduling import answer_soon

def slice_ns(thread_id):
    lines = open(f"/proc/self/task/{thread_id}/sched").read().splitlines()
    return next((int(line.split(":")[1]) for line in lines if line.startswith("se.slice")), None)

def wait():
    ready.set()
    go.wait()

# Turns are inherited: whoever started this may have asked for short ones.
print(slice_ns(threading.get_native_id()))
ready, go = threading.Event(), threading.Event()
computing = threading.Thread(target=wait)
computing.start()
ready.wait()
answer_soon()
answer_soon()
own = threading.Thread(target=lambda: print(slice_ns(threading.get_native_id())))
own.start()
own.join()
print(slice_ns(computing.native_id))
go.set()
print(sys.getswitchinterval())
"""


def test_threads_that_answer_take_short_turns_and_others_do_not() -> None:
    if not Path("/proc/self/sched").exists() or _kernel() < (6, 12):
        pytest.skip("this kernel gives everybody the same turns")
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)

    before, answering, computing, interval = run.stdout.split()
    assert int(answering) == 100_000
    assert computing == before
    assert float(interval) < 0.001


def test_threads_that_compute_and_those_they_start_give_way() -> None:
    if sys.platform != "linux":
        pytest.skip("threads have no niceness of their own here")
    found: list[int] = []

    def niceness() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def compute() -> None:
        compute_behind()
        niceness()
        _run(niceness)

    niceness()
    _run(compute)
    niceness()

    before, computing, started, after = found
    assert computing == started == min(before + 10, 19)
    assert after == before


def _run(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _kernel() -> tuple[int, int]:
    major, minor, *_ = os.uname().release.split(".")
    return int(major), int(minor)
