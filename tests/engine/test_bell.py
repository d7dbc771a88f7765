"""A bell in shared memory, between processes."""

import mmap
import subprocess
import sys
import time
from pathlib import Path

from engine.bell import Bell


def test_a_ring_from_another_process_ends_the_wait(tmp_path: Path) -> None:
    path = tmp_path / "bell"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    bell = Bell(memory, 8)
    code = (
        "import mmap, sys; from engine.bell import Bell;"
        f"file = open({str(path)!r}, 'r+b'); sys.stdin.readline();"
        "Bell(mmap.mmap(file.fileno(), mmap.PAGESIZE), 8).ring()"
    )
    ringing = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)
    count, started_at = bell.count, time.monotonic()

    ringing.communicate("now\n")
    while bell.count == count:
        bell.wait(count, timeout_s=30)
        assert time.monotonic() - started_at < 20, "the ring was not heard"

    assert ringing.returncode == 0
    assert (count, bell.count) == (0, 1)


def test_a_wait_is_bounded_and_not_begun_after_a_ring() -> None:
    bell = Bell(bytearray(Bell.NUM_BYTES), 0)

    started_at = time.monotonic()
    bell.wait(0, timeout_s=0.05)
    assert 0.04 <= time.monotonic() - started_at < 5
    bell.ring()
    bell.wait(0, timeout_s=30)

    assert time.monotonic() - started_at < 5
