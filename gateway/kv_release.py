"""Giving back what prefill workers hold for requests that have no use for it any more."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from mesh.client import Channels, mesh_errors
from mesh.errors import MeshError
from mesh.v1 import prefill_pb2, prefill_pb2_grpc

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
# A worker that was frozen is told when it is back, unless its lease was over long ago.
_PATIENCE_S = 60.0
_DELAY_S = 1.0
# What is still being given back when the gateway stops is left to the leases.
_CLOSE_TIMEOUT_S = 2.0


class KvReleases:
    """Owns the calls that give KV back, which keep nobody waiting."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, address: str, handle_id: str) -> None:
        """Give one handle back, as soon as its holder can be reached."""
        request = prefill_pb2.ReleaseKvRequest(handle_id=handle_id)
        self._start(self._send(address, request, _PATIENCE_S))

    def release_all(self, address: str, request_id: str) -> None:
        """Give back whatever is held for a request, of which no handle has come.

        Asked once and now: later, the request may have come back to that worker.
        """
        request = prefill_pb2.ReleaseKvRequest(request_id=request_id)
        self._start(self._send(address, request, 0))

    async def close(self) -> None:
        """Wait for what is being given back."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _start(self, sending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(sending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(
        self, address: str, request: prefill_pb2.ReleaseKvRequest, patience_s: float
    ) -> None:
        give_up_at = time.monotonic() + patience_s
        is_reported = False
        while True:
            # Another one each time: the holder may have been replaced.
            stub = prefill_pb2_grpc.PrefillServiceStub(self._channels.get(address))
            try:
                with mesh_errors():
                    await stub.ReleaseKv(request, timeout=_TIMEOUT_S)
                return
            except MeshError as error:
                if not is_reported:
                    logger.warning("KV not released yet", extra={"error": str(error)})
                is_reported = True
                if time.monotonic() >= give_up_at:
                    return
            await asyncio.sleep(_DELAY_S)
