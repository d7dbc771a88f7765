"""Processes that end with the one that started them, however that one ends.

Also a program, which needs nothing but the standard library: `parent_death.py PARENT COMMAND...`
becomes the command. A `preexec_fn` would do without, but it runs every handler that libraries have
registered for forks, in a copy of a process with threads, where some wait for locks for ever.
"""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGTERM when the parent's thread that forked ends; exit if it is gone.

    Does nothing where the kernel cannot do it.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the request above: then nobody will tell us.
    if os.getppid() != parent_pid:
        logger.error("the parent is gone", extra={"parent_pid": parent_pid})
        raise SystemExit(1)


def ends_with_me(command: Sequence[str]) -> list[str]:
    """The command that, started by this thread, ends with it."""
    # Isolated and without site-packages: it starts in a few milliseconds.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
