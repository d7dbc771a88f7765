"""The rules in force: read at the start, read again when the file changes."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from gateway.rules.loader import RulesInvalid, load
from gateway.rules.model import RuleSet

logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, int]


class RuleSource:
    """Owns the current rules. A file that turns invalid changes nothing and is logged."""

    def __init__(
        self,
        path: Path | None,
        *,
        check_interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises RulesInvalid. Without a path there are no rules."""
        self._path = path
        self._check_interval_s = check_interval_s
        self._clock = clock
        self._checked_at = clock()
        self._stamp = None if path is None else _stamp(path)
        self._rules = RuleSet() if path is None else load(path)

    def current(self) -> RuleSet:
        """The rules to apply now; looks at the file once in a while."""
        now = self._clock()
        if self._path is not None and now - self._checked_at >= self._check_interval_s:
            self._checked_at = now
            if _stamp(self._path) != self._stamp:
                self.reload()
        return self._rules

    def reload(self) -> bool:
        """Read the file again, changed or not (on SIGHUP); whether it is in force now."""
        if self._path is None:
            return True
        # Before the file is read: what changes in between is seen next time.
        self._stamp = _stamp(self._path)
        try:
            self._rules = load(self._path)
        except RulesInvalid as error:
            logger.error(
                "the rules file is invalid: the rules before it stay in force",
                extra={"path": str(self._path), "problems": str(error).splitlines()},
            )
            return False
        logger.info(
            "rules loaded", extra={"path": str(self._path), "rules": len(self._rules.rules)}
        )
        return True


def _stamp(path: Path) -> _Stamp | None:
    """What changes when a file is written or replaced; None while it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
