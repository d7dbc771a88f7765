"""Feeds: the tokens of a caller's decodes, a message for all that come up together."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from mesh.errors import InvalidRequest
from mesh.v1 import decode_pb2


class OpenFeed:
    """Tokens on their way to one caller.

    What waits for a caller that reads slowly is bounded by what its decodes may produce.
    """

    def __init__(self) -> None:
        self._sequence_ids: list[int] = []
        self._token_ids: list[int] = []
        self._changed = asyncio.Event()
        self._is_closed = False

    def put(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Send tokens of one decode; those of a feed that has ended go nowhere."""
        if self._is_closed:
            return
        self._sequence_ids += [sequence_id] * len(token_ids)
        self._token_ids += token_ids
        self._changed.set()

    def close(self) -> None:
        """End the feed once what waits in it has been read."""
        self._is_closed = True
        self._changed.set()

    async def messages(self) -> AsyncGenerator[decode_pb2.FeedResponse, None]:
        """All that waits, each time there is something."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._token_ids:
                message = decode_pb2.FeedResponse(
                    sequence_ids=self._sequence_ids, token_ids=self._token_ids
                )
                self._sequence_ids, self._token_ids = [], []
                yield message
            if self._is_closed:
                return


class Feeds:
    """The feeds that are open."""

    def __init__(self) -> None:
        self._open: dict[str, OpenFeed] = {}

    def __len__(self) -> int:
        return len(self._open)

    def get(self, feed_id: str) -> OpenFeed | None:
        return self._open.get(feed_id)

    async def serve(self, feed_id: str) -> AsyncGenerator[decode_pb2.FeedResponse, None]:
        """A feed's messages; it is open for as long as they are read."""
        if not feed_id:
            raise InvalidRequest("a feed needs an id", param="feed_id")
        if feed_id in self._open:
            raise InvalidRequest("the feed is open already", param="feed_id")
        feed = self._open[feed_id] = OpenFeed()
        try:
            async for message in feed.messages():
                yield message
        finally:
            feed.close()
            del self._open[feed_id]

    def close(self) -> None:
        """End all of them."""
        for feed in self._open.values():
            feed.close()
