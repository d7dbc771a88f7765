"""The colder tiers of this machine's agent: filled behind the engine, asked before it computes."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, Self

from engine.block_pool import BlockEvents
from engine.reports import EngineStats
from engine.request import EngineEvent, RemoteKvWanted, Request
from mesh.telemetry import use_span
from mesh.v1 import kv_transfer_pb2
from worker.engine_port import EnginePort
from worker.spans import run_of
from worker.transfer_agent import PullFailed, TransferAgent

logger = logging.getLogger(__name__)

_MAX_BLOCKS_PER_CALL = 128
_MAX_WAITING_BLOCKS = 8192
_STORE_TIMEOUT_S = 5.0
_LOAD_TIMEOUT_S = 2.0
_RETRY_DELAY_S = 1.0
# How long filled blocks may wait for others, so that a call to the agent is worth its cost...
_LINGER_S = 0.5
# ... unless they are this part of the blocks that the engine evicts before them.
_URGENT_SHARE = 1 / 8
# How long an end is put off by what was filled last: a restart may find it warm.
_LAST_STORES_TIMEOUT_S = 2.0


class TieredEnginePort(EnginePort, Protocol):
    """An engine that asks colder tiers, and can do without their answer for a while."""

    def tiered_kv_done(self, request_id: str, num_blocks: int) -> None: ...

    def remote_kv_late(self, request_id: str) -> None: ...


@dataclass(frozen=True)
class TierOwner:
    """Whose blocks are stored and loaded."""

    engine_id: str
    model: str
    # Whether the agent has colder tiers; it may be another process by now.
    has_tiers: Callable[[], bool]


class TieredKv:
    """An engine whose requests look into the colder tiers first, and which fills them.

    To be used in place of the engine, inside its block.
    """

    def __init__(self, engine: TieredEnginePort, agent: TransferAgent, owner: TierOwner) -> None:
        self._engine = engine
        self._agent = agent
        self._owner = owner
        # Blocks that were filled, with their generations, until the agent has been told.
        self._filled: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._changed = asyncio.Event()
        self._loads: set[asyncio.Task[None]] = set()
        self._is_ending = False

    async def __aenter__(self) -> Self:
        self._storing = asyncio.create_task(self._store_to_the_end())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._is_ending = True
        self._changed.set()
        await asyncio.wait({self._storing}, timeout=_LAST_STORES_TIMEOUT_S)
        for task in (self._storing, *self._loads):
            task.cancel()
        await asyncio.wait({self._storing, *self._loads})

    def offer(self, events: BlockEvents) -> None:
        """Note what the engine filled and evicted, without waiting for the agent."""
        for key in events.removed:
            self._filled.pop(key, None)
        if not self._owner.has_tiers():
            return
        for key, *place in zip(events.stored, events.block_ids, events.generations, strict=True):
            block_id, generation = place
            # What came from disk stays there, and in the system's page cache. A copy in the host
            # tier would cost as much as the reading did, just when the request is computed.
            if key not in events.from_tiers:
                self._filled[key] = (block_id, generation)
        while len(self._filled) > _MAX_WAITING_BLOCKS:
            self._filled.popitem(last=False)
        self._changed.set()

    async def generate(self, request: Request) -> AsyncGenerator[EngineEvent, None]:
        """As the engine does it, but prompts are looked up in the colder tiers first."""
        is_asked = request.num_tiered_tokens != 0 and not request.remote_kv
        if is_asked and self._owner.has_tiers():
            request = replace(request, tiered_kv=True)
        async with aclosing(self._engine.generate(request)) as events:
            async for event in events:
                if isinstance(event, RemoteKvWanted) and event.keys:
                    # Not ours to cancel: the engine waits for its end, whoever else does.
                    self._start(self._load(event))
                else:
                    yield event

    def release_hold(self, request_id: str) -> None:
        self._engine.release_hold(request_id)

    def remote_kv_done(self, request_id: str, output_token_ids: Sequence[int] = ()) -> None:
        self._engine.remote_kv_done(request_id, output_token_ids)

    def remote_kv_failed(self, request_id: str, output_token_ids: Sequence[int] = ()) -> None:
        self._engine.remote_kv_failed(request_id, output_token_ids)

    def load(self) -> EngineStats:
        return self._engine.load()

    async def _load(self, wanted: RemoteKvWanted) -> None:
        """Fill what the tiers have of the wanted blocks, and tell the engine."""
        num_blocks = 0
        try:
            request = kv_transfer_pb2.LoadBlocksRequest(
                request_id=wanted.request_id,
                engine_id=self._owner.engine_id,
                keys=wanted.keys,
                block_ids=wanted.block_ids,
            )
            with use_span(run_of(wanted.request_id)):
                response = await self._agent.load(request, _LOAD_TIMEOUT_S)
            num_blocks = response.num_blocks
        except PullFailed as error:
            logger.warning("colder tiers do not answer", extra={"reason": str(error)})
            if error.may_still_write and not await self._agent.is_quiet(wanted.request_id):
                self._engine.remote_kv_late(wanted.request_id)
                await self._agent.wait_until_quiet(wanted.request_id)
        # Not when cancelled, which is the end: the agent may still write, and the blocks stay
        # reserved for it.
        self._engine.tiered_kv_done(wanted.request_id, num_blocks)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    async def _store_to_the_end(self) -> None:
        is_reported = False
        while self._filled or not self._is_ending:
            if not self._filled:
                self._changed.clear()
                await self._changed.wait()
                continue
            await self._linger()
            try:
                await self._store_some()
            except PullFailed as error:
                # What the agent missed is lost to the tiers, and to nobody else.
                if not is_reported:
                    logger.warning("colder tiers take nothing", extra={"reason": str(error)})
                is_reported = True
                if self._is_ending:
                    return
                await asyncio.sleep(_RETRY_DELAY_S)
            else:
                is_reported = False

    async def _linger(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while not (self._is_ending or self._is_urgent()):
                    self._changed.clear()
                    await self._changed.wait()

    def _is_urgent(self) -> bool:
        return len(self._filled) >= _URGENT_SHARE * self._engine.load().num_free_blocks

    async def _store_some(self) -> None:
        keys = list(islice(self._filled, _MAX_BLOCKS_PER_CALL))
        places = [self._filled.pop(key) for key in keys]
        await self._agent.store(
            kv_transfer_pb2.StoreBlocksRequest(
                engine_id=self._owner.engine_id,
                model=self._owner.model,
                keys=keys,
                block_ids=[block_id for block_id, _ in places],
                generations=[generation for _, generation in places],
            ),
            _STORE_TIMEOUT_S,
        )
