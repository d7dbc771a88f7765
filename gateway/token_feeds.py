"""Tokens of all decodes on a worker over one call, and of one decode from wherever they come."""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeAlias

import grpc

from gateway.attempts import WorkerLost, worker_losses
from gateway.patience import Patience
from mesh.client import Channels, mesh_errors, settled
from mesh.v1 import decode_pb2, decode_pb2_grpc, scheduler_pb2

logger = logging.getLogger(__name__)

DecodeCall: TypeAlias = (
    "grpc.aio.UnaryStreamCall[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]"
)

# A worker that has no feeds is asked again after so long.
_REOPEN_DELAY_S = 1.0


class Feed:
    """One call to one worker, which brings a message for each of its steps."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.feed_id = uuid.uuid4().hex
        self._began_at = time.monotonic()
        self._streams: dict[int, DecodeStream] = {}
        self.is_broken = False
        self._reading = asyncio.create_task(self._read(channel), name="token-feed")

    @property
    def is_worn(self) -> bool:
        """It broke, and it is time for another one."""
        return self.is_broken and time.monotonic() - self._began_at >= _REOPEN_DELAY_S

    def add(self, sequence_id: int, stream: "DecodeStream") -> None:
        self._streams[sequence_id] = stream

    def remove(self, sequence_id: int) -> None:
        self._streams.pop(sequence_id, None)

    async def close(self) -> None:
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading

    async def _read(self, channel: grpc.aio.Channel) -> None:
        # Decodes that begin before it is open send their tokens themselves.
        await settled(channel)
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        call = stub.Feed(decode_pb2.FeedRequest(feed_id=self.feed_id))
        try:
            while True:
                message = await call.read()
                if not isinstance(message, decode_pb2.FeedResponse):
                    return
                for sequence_id, token_id in zip(
                    message.sequence_ids, message.token_ids, strict=True
                ):
                    # Tokens of a stream that was given up are of no use.
                    if (stream := self._streams.get(sequence_id)) is not None:
                        stream.put(token_id)
        except grpc.aio.AioRpcError as error:
            # Workers without feeds, and those that are gone, are known by their decodes too.
            logger.debug("token feed ended", extra={"code": error.code().name})
        finally:
            self.is_broken = True
            call.cancel()
            for stream in self._streams.values():
                stream.wake()


class TokenFeeds:
    """A feed for each worker, opened with its first decode and again after it broke."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._feeds: dict[str, Feed] = {}
        self._sequence_ids = itertools.count(1)

    def decode(
        self,
        worker: scheduler_pb2.WorkerRef,
        request: decode_pb2.DecodeRequest,
        timeout_s: float,
    ) -> "DecodeStream":
        """Begin a decode. Its caller must close it."""
        channel = self._channels.get(worker.address, worker.incarnation)
        feed: Feed | None = None
        sequence_id = 0
        if not request.sampling_params.HasField("num_logprobs"):
            feed = self._feed(worker.address, channel)
            sequence_id = next(self._sequence_ids)
            request.feed_id, request.feed_sequence_id = feed.feed_id, sequence_id
        call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(request, timeout=timeout_s)
        return DecodeStream(call, feed, sequence_id)

    async def close(self) -> None:
        while self._feeds:
            _, feed = self._feeds.popitem()
            await feed.close()

    def _feed(self, address: str, channel: grpc.aio.Channel) -> Feed:
        feed = self._feeds.get(address)
        if feed is None or feed.is_worn:
            for gone in [one for one, old in self._feeds.items() if old.is_worn]:
                del self._feeds[gone]
            # It belongs to no request: neither to the id nor to the trace of its first one.
            feed = self._feeds[address] = Context().run(Feed, channel)
        return feed


class DecodeStream:
    """One decode: what its own call says, and the tokens that its worker's feed brings.

    The first tokens come with the call and say whether the feed brings the others; the call's
    next message is then its last one. What waits here for a slow client is bounded by what the
    request may produce.
    """

    def __init__(self, call: DecodeCall, feed: Feed | None, sequence_id: int) -> None:
        self._call = call
        self._feed = feed
        self._sequence_id = sequence_id
        self._patience = Patience()
        self._token_ids: list[int] = []
        self._num_fed_tokens = 0
        # Reads the call's last message, once tokens come from the feed.
        self._ending: asyncio.Task[decode_pb2.DecodeResponse | None] | None = None
        self._waiting: asyncio.Future[None] | None = None
        if feed is not None:
            feed.add(sequence_id, self)

    async def read(
        self, timeout_s: float, worker_id: str
    ) -> decode_pb2.DecodeResponse | Sequence[int] | None:
        """The next message, or tokens that came without one; None at the end.

        Raises WorkerLost when nothing comes, and what else the worker raised.
        """
        with worker_losses(worker_id, timeout_s), self._patience.for_(timeout_s):
            if self._ending is not None:
                return await self._next(self._ending, worker_id)
            response = await _message(self._call)
        if response is not None and response.is_fed:
            self._ending = asyncio.create_task(_message(self._call))
            self._ending.add_done_callback(self._ended)
        return response

    def put(self, token_id: int) -> None:
        """A token from the feed."""
        self._token_ids.append(token_id)
        self._num_fed_tokens += 1
        self.wake()

    def wake(self) -> None:
        """There is something to know."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self) -> None:
        """End the decode, unless it has ended."""
        if self._feed is not None:
            self._feed.remove(self._sequence_id)
        self._patience.close()
        self._call.cancel()

    async def _next(
        self, ending: "asyncio.Task[decode_pb2.DecodeResponse | None]", worker_id: str
    ) -> decode_pb2.DecodeResponse | Sequence[int] | None:
        assert self._feed is not None, "only a decode with a feed is fed"
        while True:
            if self._token_ids:
                token_ids, self._token_ids = self._token_ids, []
                return token_ids
            if ending.done():
                response = ending.result()
                if response is None or self._num_fed_tokens >= response.finished.num_fed_tokens:
                    return response
            if self._feed.is_broken:
                raise WorkerLost(f"{worker_id}: its token feed broke")
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting

    def _ended(self, ending: "asyncio.Task[decode_pb2.DecodeResponse | None]") -> None:
        if not ending.cancelled():
            # Whoever has left the decode does not ask why it failed.
            ending.exception()
        self.wake()


async def _message(
    call: "grpc.aio.UnaryStreamCall[Any, decode_pb2.DecodeResponse]",
) -> decode_pb2.DecodeResponse | None:
    """The call's next message; None at its end."""
    with mesh_errors():
        response = await call.read()
    return response if isinstance(response, decode_pb2.DecodeResponse) else None
