"""How the kernel shares cores between those who answer and those who compute."""

import ctypes
import logging
import os
import sys
import threading

logger = logging.getLogger(__name__)

# The shortest that Linux takes. Whoever asks for short turns is let in at once by those who
# take long ones: otherwise a thread that computes is let finish its turn, of some milliseconds,
# before one that has a message to pass on.
_SHORT_SLICE_NS = 100_000
# How long a thread may keep the interpreter from another one that wants it.
_SWITCH_INTERVAL_S = 0.0005

# How much nicer threads are that compute. Enough for a thread with a message to be let in at
# once, whatever it did before; short of leaving them nothing where a machine is shared.
_COMPUTE_NICENESS = 10

_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


class _SchedAttr(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("sched_policy", ctypes.c_uint32),
        ("sched_flags", ctypes.c_uint64),
        ("sched_nice", ctypes.c_int32),
        ("sched_priority", ctypes.c_uint32),
        ("sched_runtime", ctypes.c_uint64),
        ("sched_deadline", ctypes.c_uint64),
        ("sched_period", ctypes.c_uint64),
    )


def answer_soon() -> None:
    """Let the calling thread, and threads that it starts, in before threads that compute.

    It changes when a thread runs and not how much of a core it gets. Linux knows this since
    6.12; elsewhere nothing happens.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    number = _SYS_SCHED_SETATTR.get(os.uname().machine)
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    attributes = _SchedAttr(
        size=ctypes.sizeof(_SchedAttr),
        sched_policy=os.SCHED_OTHER,
        sched_nice=os.getpriority(os.PRIO_PROCESS, 0),
        sched_runtime=_SHORT_SLICE_NS,
    )
    if ctypes.CDLL(None, use_errno=True).syscall(number, 0, ctypes.byref(attributes), 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        logger.debug("no short turns from this kernel", extra={"reason": reason})


def compute_behind() -> None:
    """Let the calling thread, and threads that it starts, compute in what others leave.

    Those others have messages to pass on, and leave most of a core. Linux knows niceness by
    thread; elsewhere nothing happens. There is no way back for a process without privileges.
    """
    if sys.platform == "linux":
        thread_id = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread_id) + _COMPUTE_NICENESS
        os.setpriority(os.PRIO_PROCESS, thread_id, niceness)
