"""Wakes threads of other processes by a word of shared memory, without a message."""

import ctypes
import mmap
import os

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_ALL = (1 << 31) - 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine)
# How often to look where the kernel cannot wake us.
_POLL_S = 0.001
_libc = ctypes.CDLL(None)
# Keeps the interpreter's lock: giving it up takes longer than the call.
_quick_libc = ctypes.PyDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """A counter of 32 bits. Who sees that it was rung sees all that was written before.

    When two ring at once, one may be missed: bound every wait.
    """

    NUM_BYTES = 4

    def __init__(self, memory: mmap.mmap | bytearray, offset: int) -> None:
        self._count = ctypes.c_uint32.from_buffer(memory, offset)

    @property
    def count(self) -> int:
        return self._count.value

    def ring(self) -> None:
        self._count.value += 1
        if _SYS_FUTEX is not None:
            _quick_libc.syscall(
                ctypes.c_long(_SYS_FUTEX), ctypes.byref(self._count), _FUTEX_WAKE, _ALL, None
            )

    def wait(self, count: int, timeout_s: float) -> None:
        """Until the count is another, the time is over, or earlier; other threads run."""
        if _SYS_FUTEX is None:
            _libc.poll(None, ctypes.c_ulong(0), int(1000 * min(timeout_s, _POLL_S)))
            return
        timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        _libc.syscall(
            ctypes.c_long(_SYS_FUTEX),
            ctypes.byref(self._count),
            _FUTEX_WAIT,
            ctypes.c_uint32(count),
            ctypes.byref(timeout),
        )
