"""Processes that end with the one that started them, however that one ends."""

import ctypes
import logging
import os
import signal
import sys

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
# Found now: between fork and exec a child may not load anything.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent's thread that forked ends.

    Fit for `preexec_fn`. Does nothing where the kernel cannot do it.
    """
    if _libc is not None and _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def die_with_parent(parent_pid: int) -> None:
    """Like `end_with_parent`, for a process that runs already; exit if `parent_pid` is gone."""
    end_with_parent()
    # The parent may have died before the request above: then nobody will tell us.
    if os.getppid() != parent_pid:
        logger.error("the parent is gone", extra={"parent_pid": parent_pid})
        raise SystemExit(1)
