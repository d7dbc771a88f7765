"""Shared memory of worker processes that were killed and could not give it back."""

import fcntl
import logging
import re
from pathlib import Path

logger = logging.getLogger(__name__)

_INCARNATION = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}")


def remove_stale_segments(folder: Path, prefix: str) -> None:
    """Unlink the segments whose names are `prefix` and an incarnation, and that no engine holds.

    An engine keeps its file locked; the kernel lets go of the lock when the process is gone.
    """
    for path in folder.glob("*"):
        if not (path.name.startswith(prefix) and _INCARNATION.fullmatch(path.name[len(prefix) :])):
            continue
        with path.open("rb") as segment:
            try:
                fcntl.flock(segment, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            path.unlink(missing_ok=True)
        logger.warning("removed the segment of a process that is gone", extra={"path": str(path)})
