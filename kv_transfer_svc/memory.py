"""How the process takes and gives back memory."""

import ctypes

# malloc.h
_M_MMAP_THRESHOLD = -3
_MOST_BYTES = 32 << 20


def reuse_freed_blocks() -> None:
    """Make malloc keep blocks of KV size that were freed, for the next ones.

    By default glibc maps each by itself: every copy of a block into the host tier would begin
    with the kernel clearing new pages, which takes longer than the copy. Other C libraries have
    no such setting; there nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES)
