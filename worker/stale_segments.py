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
        try:
            with path.open("rb") as segment:
                fcntl.flock(segment, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except BlockingIOError:
            continue
        except OSError as error:
            # Another user's, or gone by now. It is only memory, and not ours to give back.
            logger.warning("segment not removed", extra={"reason": str(error)})
            continue
        logger.warning("removed the segment of a process that is gone", extra={"path": str(path)})
