"""Fetches the KV that a prefill worker holds for a request into this worker's blocks."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

from decode_svc.fallbacks import ComputeHere, Fallback, count_fallback
from decode_svc.kv_holder import HandoverLost, KvHolder, LeaseOver, RemoteKv
from engine.request import RemoteKvWanted
from mesh.client import Channels
from mesh.errors import KvTransferFailed
from mesh.v1 import kv_transfer_pb2, types_pb2
from worker.arrivals import Arrivals
from worker.transfer_agent import PullFailed, TransferAgent

logger = logging.getLogger(__name__)


class RemoteKvSink(Protocol):
    """What an import tells the engine: how it ended, and perhaps again what it said before."""

    def remote_kv_done(self, request_id: str, output_token_ids: Sequence[int] = ()) -> None: ...

    def remote_kv_failed(self, request_id: str, output_token_ids: Sequence[int] = ()) -> None: ...


@dataclass(frozen=True)
class KvImportLimits:
    """How long an import waits for the other side."""

    pull_timeout_s: float = 10.0
    release_timeout_s: float = 2.0


class KvImporter:
    """Makes claims on remote KV, and owns the work that outlives their requests."""

    def __init__(
        self,
        engine: RemoteKvSink,
        channels: Channels,
        *,
        engine_id: str,
        transfer_address: str,
        layout_fingerprint: str,
        block_size: int,
        limits: KvImportLimits,
        arrivals: Arrivals | None = None,
        block_bytes: int = 0,
    ) -> None:
        """`arrivals` makes the ends of pulls known sooner."""
        self.engine = engine
        self.arrivals = arrivals
        self.block_bytes = block_bytes
        self.channels = channels
        self.engine_id = engine_id
        # This machine's agent: the one that may write to this engine's blocks.
        self.transfer_address = transfer_address
        self.block_size = block_size
        self.limits = limits
        self._layout_fingerprint = layout_fingerprint
        self._tasks: set[asyncio.Task[None]] = set()
        # Handles being given back: nothing of ours depends on that.
        self._releases: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Give up what still runs: no request does any more."""
        for task in (*self._tasks, *self._releases):
            task.cancel()
        await self.wait_until_idle()
        await asyncio.gather(*self._releases, return_exceptions=True)

    def objection(self, handle: types_pb2.KvHandle, num_tokens: int) -> Fallback | None:
        """Why `handle` cannot stand for the KV of `num_tokens` tokens here, if it cannot."""
        if handle.layout_fingerprint != self._layout_fingerprint:
            return Fallback.LAYOUT_MISMATCH
        num_blocks = -(-num_tokens // self.block_size)
        if handle.num_tokens < num_tokens or len(handle.block_ids) < num_blocks:
            return Fallback.INCOMPLETE
        return None

    def claim(self, request_id: str, remote: RemoteKv) -> "KvClaim":
        """A right to remote KV for one request; to be entered, and left, whatever happens."""
        return KvClaim(self, request_id, remote)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what has to end whether or not its request lives on."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def start_release(self, holder: KvHolder) -> None:
        """Give a handle back, without keeping anyone waiting."""
        task = asyncio.create_task(holder.release_in_the_end())
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def wait_until_idle(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("KV import broke", exc_info=error)


class KvClaim:
    """One request's claim on a handle: renewed until used, released however it ends.

    Leaving the block does not wait for a pull that is under way: it ends by itself, and
    until the import has told the engine so, the engine keeps the destination blocks.
    """

    def __init__(self, importer: KvImporter, request_id: str, remote: RemoteKv) -> None:
        self._importer = importer
        self._request_id = request_id
        self._remote = remote
        self._handle = remote.handle
        self._holder = KvHolder(
            importer.channels, remote, timeout_s=importer.limits.release_timeout_s
        )
        self._agent = TransferAgent(importer.channels, importer.transfer_address)
        self._started_at = time.perf_counter()
        self._has_arrived = False
        self._is_released = False
        self._is_over = False
        self.is_importing = False
        self.payload_bytes = 0
        # What `awaits_first_token` is about, and when it came.
        self.first_token_ids: list[int] = []
        self.first_token_at: float | None = None

    async def __aenter__(self) -> Self:
        self._holder.start_renewing()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._is_over = True
        self._holder.stop()
        self._release_soon()
        if not self.is_importing:
            # The engine may have asked, and nobody will answer it any more.
            self._importer.engine.remote_kv_failed(self._request_id)

    def overlap_s(self, since: float | None) -> float:
        """For how long the prompt was still being computed, `since` the engine's clock began; None:
        the engine never had the request, and it counts from the claim."""
        if self.first_token_at is None:
            return 0.0
        return max(0.0, self.first_token_at - (self._started_at if since is None else since))

    def covers(self, num_tokens: int) -> bool:
        """Whether the handle has the KV of so many tokens, in a form that fits here."""
        objection = self._importer.objection(self._handle, num_tokens)
        if objection is not None:
            count_fallback(objection)
        return objection is None

    async def wait_for_first_token(self) -> None:
        """Until it is known, without its KV; raises KvTransferFailed if it never will be."""
        try:
            await self._wait_for_prefill()
        except HandoverLost as error:
            raise KvTransferFailed(f"prefill: {error}") from error

    def start_import(self, wanted: RemoteKvWanted, give_up: Callable[[Exception], None]) -> None:
        """Fetch the wanted blocks and tell the engine how that ended.

        `give_up` is called with ComputeHere when the transfer failed while the agent may still
        write: the engine then keeps the blocks until it cannot, so the request has to start
        over with others. It is called with KvTransferFailed when not even the token is known
        with which the request could go on.
        """
        self.is_importing = True
        self._importer.start(self._import(wanted, give_up))

    async def _import(self, wanted: RemoteKvWanted, give_up: Callable[[Exception], None]) -> None:
        tell_engine = self._importer.engine.remote_kv_failed
        following = asyncio.create_task(self._wait_for_prefill())
        pulling = asyncio.create_task(self._pull(wanted))
        try:
            with self._expect(wanted):
                if await self._fetch(pulling, following, give_up) is None:
                    tell_engine = self._importer.engine.remote_kv_done
        except asyncio.CancelledError:
            # The worker ends, and the agent may still write: the blocks stay reserved for it.
            tell_engine = _tell_nothing
            raise
        finally:
            if not self._has_arrived:
                pulling.cancel()
            # Dead or alive, the request waits for this.
            tell_engine(self._request_id, self.first_token_ids)
            if self.first_token_ids:
                # One says when the prefill ended, which the blocks do not. The other has nothing
                # left to do but to answer, and given up now, the agent would not count it.
                await asyncio.wait(
                    {following, pulling}, timeout=self._importer.limits.release_timeout_s
                )
            following.cancel()
            pulling.cancel()
            await asyncio.gather(pulling, following, return_exceptions=True)
            self._release_soon()

    @contextmanager
    def _expect(self, wanted: RemoteKvWanted) -> Iterator[None]:
        """Tell the engine sooner, where the blocks' bell is heard before the agent's answer."""
        arrivals, engine = self._importer.arrivals, self._importer.engine

        def on_arrival(token_id: int) -> None:
            self.first_token_ids = [token_id]
            self.first_token_at = time.perf_counter()
            self.payload_bytes = len(wanted.block_ids) * self._importer.block_bytes
            self._has_arrived = True
            engine.remote_kv_done(self._request_id, self.first_token_ids)

        if arrivals is None or not self._remote.awaits_first_token or not wanted.block_ids:
            yield
            return
        with arrivals.expect(wanted.block_ids, on_arrival):
            yield

    async def _fetch(
        self,
        pulling: "asyncio.Task[Fallback | None]",
        following: asyncio.Task[None],
        give_up: Callable[[Exception], None],
    ) -> Fallback | None:
        """None when the blocks are whole and nobody has changed their source.

        When it returns, nothing can write to them any more.
        """
        patience_s = self._importer.limits.pull_timeout_s
        is_lost = False
        await asyncio.wait({pulling, following}, return_when=asyncio.FIRST_COMPLETED)
        if not self.first_token_ids:
            try:
                await following
            except HandoverLost as error:
                give_up(KvTransferFailed(f"prefill: {error}"))
                is_lost, patience_s = True, 0.0
        if self._has_arrived:
            # Whatever else goes wrong.
            return None
        may_still_write = False
        try:
            fallback = await _outcome(pulling, patience_s)
            if fallback is None and not is_lost:
                fallback = await self._end_reading()
        except PullFailed as error:
            logger.warning("pull failed", extra={"reason": str(error)})
            fallback, may_still_write = Fallback.PULL_FAILED, error.may_still_write
        if fallback is not None or is_lost:
            self._release_soon()
        if fallback is not None and not (self._is_over or is_lost):
            count_fallback(fallback)
        if may_still_write and not await self._agent.is_quiet(self._request_id):
            give_up(ComputeHere())
            await self._agent.wait_until_quiet(self._request_id)
        return Fallback.INCOMPLETE if is_lost else fallback

    async def _wait_for_prefill(self) -> None:
        """Until the first token is known, if that is to come; raises HandoverLost if not."""
        if self._remote.awaits_first_token:
            token = await self._holder.first_token()
            self.first_token_ids = [token.token_id]
            # Another machine's clock may be wrong: not before we asked, nor after we knew.
            age_s = max(0.0, time.time() - token.sampled_at_s)
            sampled_at = max(self._started_at, time.perf_counter() - age_s)
            self.first_token_at = min(sampled_at, self.first_token_at or math.inf)

    async def _pull(self, wanted: RemoteKvWanted) -> Fallback | None:
        """Fill the wanted blocks, while they are computed if need be; raises PullFailed."""
        if self._holder.is_expired:
            return Fallback.LEASE_EXPIRED
        if not wanted.block_ids:
            return None
        source = slice(wanted.first_block_index, wanted.first_block_index + len(wanted.block_ids))
        request = kv_transfer_pb2.PullRequest(
            request_id=self._request_id,
            source_engine_id=self._handle.engine_id,
            source_block_ids=self._handle.block_ids[source],
            source_generations=self._handle.block_generations[source],
            source_address=self._handle.transfer_address,
            destination_engine_id=self._importer.engine_id,
            destination_block_ids=wanted.block_ids,
            follows=self._remote.awaits_first_token,
        )
        timeout_s = max(0.0, self._remote.deadline - time.monotonic())
        if not self._remote.awaits_first_token:
            timeout_s = min(self._importer.limits.pull_timeout_s, timeout_s)
        response = await self._agent.pull(request, None if timeout_s == math.inf else timeout_s)
        self.payload_bytes = response.payload_bytes
        if response.HasField("next_token_id"):
            self.first_token_ids = [response.next_token_id]
            # At the latest.
            self.first_token_at = self.first_token_at or time.perf_counter()
        return None

    async def _end_reading(self) -> Fallback | None:
        """Make sure that what was read is what the handle stands for.

        The agent has compared the blocks' generations. Where the engine keeps none, the holder
        has to say that the lease was live all the time.
        """
        if self._handle.block_generations:
            return None
        self._is_released = True
        try:
            await self._holder.release()
        except LeaseOver as error:
            self._is_released = error.is_reachable
            return Fallback.LEASE_EXPIRED if error.is_reachable else Fallback.HOLDER_UNREACHABLE
        return None

    def _release_soon(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._importer.start_release(self._holder)


def _tell_nothing(request_id: str, output_token_ids: Sequence[int] = ()) -> None:
    """Leave a request without an answer."""


async def _outcome(pulling: "asyncio.Task[Fallback | None]", patience_s: float) -> Fallback | None:
    """What a pull comes to; it is given up when it takes longer. Raises PullFailed."""
    await asyncio.wait({pulling}, timeout=patience_s)
    if pulling.done():
        return pulling.result()
    pulling.cancel()
    raise PullFailed("it was given up", may_still_write=True)
