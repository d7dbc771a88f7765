import subprocess
import sys

import psutil

STARTS_A_CHILD = """
import subprocess, sys, time
from mesh.parent_death import ends_with_me
child = subprocess.Popen(ends_with_me(["sleep", "60"]), start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_child_ends_with_its_killed_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_A_CHILD], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()

    gone, _ = psutil.wait_procs([child], timeout=10)

    assert gone == [child]


def test_a_process_whose_parent_is_gone_ends() -> None:
    code = "from mesh.parent_death import die_with_parent; die_with_parent(1 << 30)"

    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 1
