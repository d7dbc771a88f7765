"""Workers that take time and hold blocks, but compute nothing."""

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from benchmarks.placement_sim.trace import BLOCK_TOKENS
from mesh.block_index import shelf_name
from mesh.registry import RegisteredWorker, WorkerLoad, WorkerRecord
from scheduler_svc.block_table import BlockTable

MODEL = "virtual"


@dataclass(frozen=True, slots=True)
class Hardware:
    """How fast a worker is; by default about an 8-billion model on one good accelerator."""

    prefill_s_per_token: float = 1 / 12_000
    prefill_s_per_token_pair: float = 2e-9
    prefill_overhead_s: float = 0.01
    step_s: float = 0.02
    step_s_per_request: float = 0.0008
    transfer_s_per_token: float = 1 / 60_000
    # How long an event takes to reach the schedulers.
    event_delay_s: float = 0.05

    def prefill_s(self, num_tokens: int, num_cached_tokens: int) -> float:
        pairs = num_tokens * (num_cached_tokens + num_tokens / 2)
        return (
            self.prefill_overhead_s
            + self.prefill_s_per_token * num_tokens
            + self.prefill_s_per_token_pair * pairs
        )


class VirtualPrefill:
    """Computes one prompt after the other and keeps the blocks that were used last."""

    def __init__(self, name: str, num_blocks: int, table: BlockTable, hardware: Hardware) -> None:
        self.record = _record(name, "prefill", num_blocks)
        self._table = table
        self._hardware = hardware
        self._num_blocks = num_blocks
        self._cache: OrderedDict[bytes, None] = OrderedDict()
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._waiting_tokens = 0

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(
            num_blocks=self._num_blocks,
            num_free_blocks=self._num_blocks,
            num_waiting=self._num_waiting,
            num_waiting_tokens=self._waiting_tokens,
        )

    async def run(self, keys: Sequence[bytes], num_tokens: int) -> tuple[int, float]:
        """Returns the cached tokens and the seconds of computing."""
        self._num_waiting += 1
        self._waiting_tokens += num_tokens
        try:
            async with self._turn:
                num_cached = self._touch(keys, num_tokens)
                compute_s = self._hardware.prefill_s(num_tokens - num_cached, num_cached)
                await asyncio.sleep(compute_s)
        finally:
            self._num_waiting -= 1
            self._waiting_tokens -= num_tokens
        self._store(keys)
        return num_cached, compute_s

    def _touch(self, keys: Sequence[bytes], num_tokens: int) -> int:
        num_hits = 0
        for key in keys:
            if key not in self._cache:
                break
            self._cache.move_to_end(key)
            num_hits += 1
        return min(num_hits * BLOCK_TOKENS, num_tokens - 1)

    def _store(self, keys: Sequence[bytes]) -> None:
        new = [key for key in keys if key not in self._cache]
        # The beginning of a chain goes last.
        for key in reversed(keys):
            self._cache[key] = None
            self._cache.move_to_end(key)
        evicted = [
            self._cache.popitem(last=False)[0]
            for _ in range(max(0, len(self._cache) - self._num_blocks))
        ]
        shelf = shelf_name(self.record.worker_id, self.record.incarnation, "device")
        loop = asyncio.get_running_loop()
        loop.call_later(self._hardware.event_delay_s, self._table.remove, shelf, evicted)
        loop.call_later(self._hardware.event_delay_s, self._table.add, shelf, new)


class VirtualDecode:
    """All its requests make a token with every step; the more there are, the longer it takes."""

    def __init__(self, name: str, num_blocks: int, hardware: Hardware) -> None:
        self.record = _record(name, "decode", num_blocks)
        self._hardware = hardware
        self._num_blocks = num_blocks
        # Steps since the start, as of the last change of the batch.
        self._steps = 0.0
        self._changed_at = 0.0
        self._order = count()
        self._running: list[tuple[float, int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(
            num_blocks=self._num_blocks,
            num_free_blocks=self._num_blocks,
            num_running=len(self._running),
        )

    async def run(self, num_tokens: int) -> None:
        if num_tokens < 1:
            return
        self._advance()
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._running, (self._steps + num_tokens, next(self._order), done))
        self._schedule()
        await done

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._running:
            self._steps += (now - self._changed_at) / self._step_s()
        self._changed_at = now

    def _step_s(self) -> float:
        return self._hardware.step_s + self._hardware.step_s_per_request * len(self._running)

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            left = max(0.0, self._running[0][0] - self._steps) * self._step_s()
            self._timer = asyncio.get_running_loop().call_later(left, self._finish)

    def _finish(self) -> None:
        self._advance()
        while self._running and self._running[0][0] <= self._steps + 1e-6:
            heapq.heappop(self._running)[2].set_result(None)
        self._schedule()


def _record(name: str, role: str, num_blocks: int) -> WorkerRecord:
    assert role in ("prefill", "decode")
    return WorkerRecord(
        worker_id=name,
        incarnation="1",
        role="prefill" if role == "prefill" else "decode",
        address=f"{name}:1",
        model=MODEL,
        engine_id=name,
        transfer_address="",
        layout_fingerprint="virtual",
        block_size=BLOCK_TOKENS,
        num_blocks=num_blocks,
        max_model_len=1_000_000,
        max_num_batched_tokens=8192,
    )


class VirtualRegistry:
    """What the workers' heartbeats would say."""

    def __init__(self, workers: Sequence[VirtualPrefill | VirtualDecode]) -> None:
        self._workers = workers

    async def list(self) -> list[RegisteredWorker]:
        return [RegisteredWorker(worker.record, worker.load) for worker in self._workers]
