"""Questions that any of several equal services can answer, such as schedulers and tokenizers."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from mesh.client import is_connection_lost
from mesh.errors import Draining, MeshError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_FIRST_DELAY_S = 0.02
_MAX_DELAY_S = 0.5


async def ask_any(ask: Callable[[], Awaitable[Answer]], *, patience_s: float) -> Answer:
    """The answer of whichever service gives one; their refusals are answers too.

    One that is lost or drains is not asked again, since the channel to all of them knows who is
    connected. While none is, for `patience_s` from the first failure on, the question is repeated.
    """
    delay_s = _FIRST_DELAY_S
    give_up_at: float | None = None
    while True:
        try:
            return await ask()
        except MeshError as error:
            if not isinstance(error, Draining) and not is_connection_lost(error):
                raise
            now = time.monotonic()
            give_up_at = give_up_at or now + patience_s
            if now >= give_up_at:
                raise
            logger.warning("asking another service", extra={"reason": str(error)})
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, _MAX_DELAY_S)
