"""The prefill worker that holds a request's KV, as the decode worker that wants it sees it."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from mesh import metrics
from mesh.client import Channels
from mesh.v1 import prefill_pb2, prefill_pb2_grpc, types_pb2

if TYPE_CHECKING:
    from mesh.v1.prefill_pb2_grpc import PrefillServiceAsyncStub

logger = logging.getLogger(__name__)

_SHORTEST_RENEWAL_S = 0.1
_LONGEST_RENEWAL_S = 10.0
_RELEASE_DELAY_S = 0.5
_RECONNECT_DELAY_S = 0.05


@dataclass(frozen=True)
class RemoteKv:
    """KV on a prefill worker, and until when (by time.monotonic) its request is of use."""

    handle: types_pb2.KvHandle
    deadline: float = math.inf
    # The prefill still runs; the first token is to come with the rest of the KV.
    awaits_first_token: bool = False


@dataclass(frozen=True)
class FirstToken:
    """What a prefill ends with."""

    token_id: int
    # By the holder's wall clock.
    sampled_at_s: float


class HandoverLost(Exception):
    """A prefill that was followed ended without a first token, or cannot be followed."""


class _NotReached(Exception):
    """The holder did not answer at all."""


class LeaseOver(Exception):
    """The holder did not keep the blocks for us to the end, or does not say so."""

    def __init__(self, *, is_reachable: bool) -> None:
        super().__init__("the lease is over" if is_reachable else "the holder cannot be reached")
        self.is_reachable = is_reachable


class KvHolder:
    """Keeps the lease of one handle inside its block."""

    def __init__(self, channels: Channels, remote: RemoteKv, *, timeout_s: float) -> None:
        self._handle = remote.handle
        self._timeout_s = timeout_s
        self._stub: PrefillServiceAsyncStub = prefill_pb2_grpc.PrefillServiceStub(
            channels.get(remote.handle.holder_address)
        )
        self._stop_following: Callable[[], object] = lambda: None
        self._is_stopped = False
        # By the wall clock, as the holder said last.
        self._expires_at_s = remote.handle.lease_expires_at.ToNanoseconds() / 1e9
        self.is_expired = False
        self._is_reported = False

    def start_renewing(self) -> None:
        """Keep the lease while the request waits for room and while its blocks are read."""
        self._renewal = asyncio.create_task(self._renew())

    def stop(self) -> None:
        """Neither renew nor follow any more."""
        self._is_stopped = True
        self._renewal.cancel()
        self._stop_following()

    async def first_token(self) -> FirstToken:
        """Wait for the end of the prefill; raises HandoverLost if no token comes of it."""
        give_up_at = time.monotonic() + self._timeout_s
        while True:
            if self._is_stopped:
                # Before the call was made that `stop` would have ended.
                raise HandoverLost("nobody waits for it any more")
            try:
                return await self._follow()
            except _NotReached as error:
                # It has just made the handle: more likely our connection is of its predecessor.
                if time.monotonic() >= give_up_at:
                    raise HandoverLost(str(error)) from error
                await asyncio.sleep(_RECONNECT_DELAY_S)

    async def _follow(self) -> FirstToken:
        request = prefill_pb2.WatchKvRequest(handle_id=self._handle.handle_id)
        call = self._stub.WatchKv(request)
        self._stop_following = call.cancel
        is_reached = False
        try:
            async for progress in call:
                is_reached = True
                if progress.HasField("first_token_id"):
                    sampled_at_s = progress.sampled_at.ToNanoseconds() / 1e9
                    return FirstToken(progress.first_token_id, sampled_at_s)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            if error.code() is grpc.StatusCode.UNAVAILABLE and not (is_reached or self._is_stopped):
                raise _NotReached(reason) from error
            raise HandoverLost(reason) from error
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise
            raise HandoverLost("nobody waits for it any more") from None
        finally:
            call.cancel()
        raise HandoverLost("the holder ended the call without a token")

    async def release(self) -> None:
        """Give the handle back; raises LeaseOver unless its lease was live until then."""
        self._renewal.cancel()
        request = prefill_pb2.ReleaseKvRequest(handle_id=self._handle.handle_id)
        try:
            response = await self._stub.ReleaseKv(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            if not self._is_reported:
                logger.warning("handle not released", extra={"reason": error.details()})
            self._is_reported = True
            raise LeaseOver(is_reachable=False) from error
        if not response.was_live:
            raise LeaseOver(is_reachable=True)

    async def release_in_the_end(self) -> None:
        """Give the handle back as soon as the holder can be reached, unless its lease ends first.

        A holder that was frozen has kept the blocks, and would until then.
        """
        lease_ends_at = self._expires_at_s
        while True:
            try:
                await self.release()
            except LeaseOver as error:
                if error.is_reachable:
                    logger.debug("nothing to release", extra={"reason": str(error)})
                    return
                if time.time() >= lease_ends_at:
                    metrics.UNRELEASED_HANDLES.add(1)
                    return
            else:
                return
            await asyncio.sleep(_RELEASE_DELAY_S)

    async def _renew(self) -> None:
        is_reported = False
        while True:
            # A third of what is left; bounded, for the holder's clock may differ.
            delay_s = (self._expires_at_s - time.time()) / 3
            await asyncio.sleep(min(max(delay_s, _SHORTEST_RENEWAL_S), _LONGEST_RENEWAL_S))
            request = prefill_pb2.RenewKvRequest(handle_id=self._handle.handle_id)
            try:
                response = await self._stub.RenewKv(request, timeout=self._timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    self.is_expired = True
                    return
                if not is_reported:
                    logger.warning("lease not renewed", extra={"reason": error.details()})
                    is_reported = True
            else:
                self._expires_at_s = response.lease_expires_at.ToNanoseconds() / 1e9
