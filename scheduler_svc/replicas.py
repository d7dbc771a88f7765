"""Local copies of the block index, one for each model that workers serve."""

import asyncio
from collections.abc import Callable, Iterator, Mapping

from scheduler_svc.block_replica import BlockReplica


class Replicas(Mapping[str, BlockReplica]):
    """Follows the index of every model that was seen, in tasks of the given group."""

    def __init__(self, make: Callable[[str], BlockReplica], tasks: asyncio.TaskGroup) -> None:
        self._make = make
        self._tasks = tasks
        self._replicas: dict[str, BlockReplica] = {}
        self._running: list[asyncio.Task[None]] = []

    def __getitem__(self, model: str) -> BlockReplica:
        return self._replicas[model]

    def __iter__(self) -> Iterator[str]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    def follow(self, model: str) -> None:
        """Begin a copy, unless there is one."""
        if model not in self._replicas:
            replica = self._replicas[model] = self._make(model)
            self._running.append(self._tasks.create_task(replica.run(), name=f"replica-{model}"))

    def stop(self) -> None:
        for task in self._running:
            task.cancel()
