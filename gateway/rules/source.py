"""The rules in force: read at the start, read again when the file changes."""

import asyncio
import logging
from pathlib import Path
from typing import Self

from gateway.poller import Poller
from gateway.rules.loader import RulesInvalid, load
from gateway.rules.model import RuleSet

logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, int]


class RuleSource:
    """Owns the current rules, and watches their file while it is entered.

    A file that turns invalid changes nothing and is logged. Files are looked at and read in
    threads: a slow disk, or a long file, holds no request up.
    """

    def __init__(self, path: Path | None, *, check_interval_s: float = 1.0) -> None:
        """Reads the rules. Raises RulesInvalid. Without a path there are none."""
        self._path = path
        self._stamp = None if path is None else _stamp(path)
        self._rules = RuleSet() if path is None else load(path)
        self._is_asked_to_reload = False
        self._poller = Poller("rules", self.check, check_interval_s)

    async def __aenter__(self) -> Self:
        if self._path is not None:
            await self._poller.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._poller.__aexit__(*exc_info)

    def current(self) -> RuleSet:
        """The rules to apply now."""
        return self._rules

    def reload_soon(self) -> None:
        """Read the file again, changed or not (on SIGHUP)."""
        self._is_asked_to_reload = True
        self._poller.poke()

    async def check(self) -> None:
        """Read the file again if it has changed, or if somebody asked for it."""
        if self._path is None:
            return
        is_asked, self._is_asked_to_reload = self._is_asked_to_reload, False
        if is_asked or await asyncio.to_thread(_stamp, self._path) != self._stamp:
            await self._reload(self._path)

    async def _reload(self, path: Path) -> None:
        # Before the file is read: what changes in between is seen next time.
        self._stamp = await asyncio.to_thread(_stamp, path)
        try:
            self._rules = await asyncio.to_thread(load, path)
        except RulesInvalid as error:
            logger.error(
                "the rules file is invalid: the rules before it stay in force",
                extra={"path": str(path), "problems": str(error).splitlines()},
            )
            return
        logger.info("rules loaded", extra={"path": str(path), "rules": len(self._rules.rules)})


def _stamp(path: Path) -> _Stamp | None:
    """What changes when a file is written or replaced; None while it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
