"""Keeps an engine's shared-memory segment known to its machine's transfer agent."""

import asyncio
import logging
from typing import Self

import grpc

from mesh.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 2.0


class SegmentAttachment:
    """Holds an AttachSegment call open inside its block, and calls again whenever it breaks.

    A worker serves without it: requests that cannot be transferred are computed locally.
    """

    def __init__(
        self, channel: grpc.aio.Channel, segment: kv_transfer_pb2.AttachSegmentRequest
    ) -> None:
        self._agent = kv_transfer_pb2_grpc.KvTransferServiceStub(channel)
        self._segment = segment
        self.attached = asyncio.Event()
        self.has_tiers = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._stay_attached())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _stay_attached(self) -> None:
        delay_s = _FIRST_DELAY_S
        is_reported = False
        while True:
            reason, was_attached = await self._attach()
            if was_attached:
                delay_s, is_reported = _FIRST_DELAY_S, False
            if not is_reported:
                logger.warning(
                    "segment is not attached, trying again",
                    extra={"engine_id": self._segment.engine_id, "reason": reason},
                )
                is_reported = True
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    async def _attach(self) -> tuple[str, bool]:
        """Hold one call until it ends; why it ended, and whether it ever worked."""
        call = self._agent.AttachSegment(self._segment)
        was_attached = False
        try:
            async for response in call:
                was_attached = True
                self.has_tiers = response.has_tiers
                self.attached.set()
                logger.info("segment attached", extra={"engine_id": self._segment.engine_id})
        except grpc.aio.AioRpcError as error:
            return error.details() or error.code().name, was_attached
        finally:
            self.attached.clear()
            self.has_tiers = False
            call.cancel()
        return "the agent ended the call", was_attached
