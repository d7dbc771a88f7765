"""The keys in force: kept in memory, so that a key costs one hash, right or wrong."""

import hmac
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Self

from redis.exceptions import RedisError

from gateway.keys.model import ANYONE, Caller, KeyBookError
from gateway.keys.secret import digest, id_in
from gateway.keys.stores import KeyStore
from gateway.poller import Poller
from mesh import metrics
from mesh.errors import Unauthenticated, WorkerUnavailable

logger = logging.getLogger(__name__)

# What unknown ids are compared with: nobody has a key of this digest.
_NOBODY = (bytes(32), ANYONE)


class KeyRing:
    """Who has which key. Follows its store; keeps what it knows while that cannot be read."""

    def __init__(
        self,
        store: KeyStore | None,
        *,
        check_interval_s: float = 1.0,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Without a store there are no keys, and anyone may call."""
        self._clock = clock
        self._store = store
        self._is_required = store is not None and store.requires_keys
        # None: they were never read.
        self._callers: dict[str, tuple[bytes, Caller]] | None = None
        self._stamp: object = None
        self._is_failing = False
        self._poller = Poller("keys", self.check, check_interval_s)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Raises KeyBookError when the keys are there and make no sense."""
        if self._store is not None:
            try:
                await self._read(self._store)
            except (OSError, RedisError) as error:
                # Nobody is let in because of a disk that fails.
                self._is_required = True
                self._failed(error)
            await self._stack.enter_async_context(self._poller)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    @property
    def is_required(self) -> bool:
        """Whether a caller needs a key. Once it is so it stays so: deleting the keys of a running
        gateway opens nothing."""
        return self._is_required

    def authenticate(self, authorization: list[str]) -> Caller:
        """Who sent these Authorization headers.

        Raises Unauthenticated, and WorkerUnavailable while the keys are unknown. A wrong
        key costs a hash and a comparison, whose time does not depend on the key.
        """
        if not self._is_required:
            return ANYONE
        key = _bearer(authorization)
        if key is None:
            metrics.REFUSALS.add(1, {"reason": "no_key"})
            raise Unauthenticated(
                "You didn't provide an API key. Send it in an Authorization header: "
                "Authorization: Bearer YOUR_KEY."
            )
        return self._find(key)

    def find(self, key: str) -> Caller | None:
        """Who has this key; None if nobody does."""
        try:
            return self._find(key)
        except Unauthenticated:
            return None

    async def check(self) -> None:
        """Read the keys again if they have changed."""
        assert self._store is not None, "only a store is polled"
        try:
            if self._callers is None or await self._store.stamp() != self._stamp:
                await self._read(self._store)
            elif self._is_failing:
                self._recovered()
        except (OSError, RedisError, KeyBookError) as error:
            self._failed(error)

    def _find(self, key: str) -> Caller:
        if self._callers is None:
            raise WorkerUnavailable("the API keys have not been read yet")
        key_id = id_in(key)
        stored, caller = self._callers.get(key_id or "", _NOBODY)
        # What has not the form of a key may be long: it is not even hashed.
        if not hmac.compare_digest(digest(key if key_id is not None else ""), stored):
            metrics.REFUSALS.add(1, {"reason": "wrong_key"})
            raise Unauthenticated("Incorrect API key provided.")
        if caller.expires_at is not None and self._clock() >= caller.expires_at:
            metrics.REFUSALS.add(1, {"reason": "expired_key"})
            raise Unauthenticated("Your API key has expired.")
        return caller

    async def _read(self, store: KeyStore) -> None:
        # Before the keys: what changes in between is seen next time.
        stamp = await store.stamp()
        if stamp is None and self._is_required and self._callers is not None:
            # Not "no keys": those that somebody had are gone, or were restored as older ones.
            self._stamp = None
            logger.error("the API keys are gone: those known stay in force until restart")
            return
        self._is_required = self._is_required or stamp is not None
        book = await store.read()
        self._callers, self._stamp = book.callers(), stamp
        self._recovered()
        logger.info("keys read", extra={"keys": len(self._callers), "revision": book.revision})

    def _failed(self, error: Exception) -> None:
        if not self._is_failing:
            logger.error(
                "the API keys cannot be read: those known stay in force",
                extra={"error": repr(error)},
            )
        self._is_failing = True

    def _recovered(self) -> None:
        if self._is_failing:
            logger.info("the API keys can be read again")
        self._is_failing = False


def _bearer(authorization: list[str]) -> str | None:
    """The one key that was sent. Two could be meant for two different readers."""
    if len(authorization) != 1:
        return None
    scheme, _, key = authorization[0].partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None
