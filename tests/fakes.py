"""Stand-ins for expensive parts, typed like the real ones."""

import hashlib
import sys
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from engine.batcher import Batcher, ScheduledRequest
from engine.block_pool import BlockPool
from engine.config import SpeculationLimits
from engine.engine import Engine
from engine.layered_prefill import LayeredPrefill
from engine.model_runner import Runner
from engine.request import EngineEvent, Request, RequestFailed, TokenOutput
from engine.sampling import NextToken, Sampler, SamplingParams
from engine.speculation import Speculator

EOS = 2

Logits = npt.NDArray[np.float32]


class FakeClock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class ContentHasher:
    """A BlockHasher without the mesh."""

    def root(self, cache_salt: str = "") -> bytes:
        return hashlib.sha256(f"root {cache_salt}".encode()).digest()[:16]

    def extend(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        return hashlib.sha256(parent + repr(list(token_ids)).encode()).digest()[:16]


def logits_after(token_ids: Sequence[int], vocab_size: int) -> Logits:
    """Random logits that depend on every token and on their order."""
    seed = zlib.crc32(np.array(token_ids, dtype=np.int64).tobytes())
    row = np.random.default_rng(seed).standard_normal(vocab_size, dtype=np.float32)
    return row * 2


class MemoryRunner:
    """A model whose KV cache holds token ids, and whose logits follow from what the cache holds.

    A block that is missing, stale, overwritten or in the wrong place changes the output.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 40) -> None:
        self.vocab_size = vocab_size
        self.block_bytes = 8 * block_size
        self.memory = np.full((num_blocks, block_size), -1, dtype=np.int64)
        # Number of tokens in each step so far.
        self.step_sizes: list[int] = []
        # Whose rows are to be NaN; told the request before the token.
        self.is_broken: Callable[[Request], bool] = lambda request: False
        # Rows after so many tokens are NaN as well.
        self.is_broken_from = sys.maxsize
        self.is_closed = False
        # What a layer of a pass in parts takes.
        self.clock: FakeClock | None = None
        self.layer_s = 1.0

    def execute(
        self,
        scheduled: Sequence[ScheduledRequest],
        on_kv_written: Callable[[], None] | None = None,
    ) -> Logits:
        self.step_sizes.append(sum(item.num_rows for item in scheduled))
        for item in scheduled:
            start = item.request.num_computed_tokens
            self.write(item.request.block_ids, start, item.token_ids())
        if on_kv_written is not None:
            on_kv_written()
        rows = [
            self._row(item.request, item.request.num_computed_tokens + item.num_rows - later)
            for item in scheduled
            for later in reversed(range(item.num_logits))
        ]
        return np.array(rows, dtype=np.float32).reshape(len(rows), self.vocab_size)

    def begin(self, scheduled: Sequence[ScheduledRequest]) -> "MemoryPass":
        return MemoryPass(self, scheduled)

    def write(self, block_ids: Sequence[int], start: int, token_ids: Sequence[int]) -> None:
        """What a pass, or a transfer from another engine, leaves in the cache."""
        block_size = self.memory.shape[1]
        for position, token_id in enumerate(token_ids, start):
            self.memory[block_ids[position // block_size], position % block_size] = token_id

    def close(self) -> None:
        self.is_closed = True

    def _row(self, request: Request, num_tokens: int) -> Logits:
        if self.is_broken(request) or num_tokens >= self.is_broken_from:
            return np.full(self.vocab_size, np.nan, dtype=np.float32)
        seen = self.memory[request.block_ids].flatten()[:num_tokens]
        return logits_after(seen.tolist(), self.vocab_size)


class MemoryPass:
    """A batch that takes four layers, each of which writes to the blocks that the requests had."""

    def __init__(self, runner: MemoryRunner, scheduled: Sequence[ScheduledRequest]) -> None:
        self._runner = runner
        self._scheduled = scheduled
        self._block_ids = [list(item.request.block_ids) for item in scheduled]
        self.num_layers_left = 4

    def advance(
        self, num_layers: int, on_kv_written: Callable[[], None] | None = None
    ) -> Logits | None:
        self.num_layers_left -= min(num_layers, self.num_layers_left)
        if self._runner.clock is not None:
            self._runner.clock.advance(num_layers * self._runner.layer_s)
        if self.num_layers_left == 0:
            return self._runner.execute(self._scheduled, on_kv_written)
        for item, block_ids in zip(self._scheduled, self._block_ids, strict=True):
            start = item.request.num_computed_tokens
            token_ids = item.request.token_ids[start:][: item.num_tokens]
            self._runner.write(block_ids, start, token_ids)
        return None


def make_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    runner: Runner | None = None,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    long_prefill_token_threshold: int = 0,
    max_model_len: int = 200,
    max_num_waiting: int = 100,
    enable_prefix_caching: bool = True,
    speculation: SpeculationLimits | None = None,
    layered: LayeredPrefill | None = None,
    clock: Callable[[], float] | None = None,
) -> Engine:
    """An engine over a MemoryRunner, or over another runner."""
    pool = BlockPool(
        num_blocks, block_size, ContentHasher(), enable_prefix_caching=enable_prefix_caching
    )
    clock = clock or FakeClock()
    batcher = Batcher(
        pool,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=long_prefill_token_threshold,
        speculator=Speculator(speculation, max_model_len) if speculation else None,
        clock=clock,
    )
    return Engine(
        runner or MemoryRunner(num_blocks, block_size),
        Sampler(frozenset({EOS})),
        batcher,
        pool,
        eos_token_ids=frozenset({EOS}),
        max_model_len=max_model_len,
        max_num_waiting=max_num_waiting,
        layered=layered,
        clock=clock,
    )


def run_to_end(engine: Engine, *requests: Request) -> dict[str, list[TokenOutput]]:
    """Add requests, step until nothing is left to do, and return each one's tokens."""
    for request in requests:
        engine.add_request(request)
    outputs: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
    for event in run_until_stalled(engine):
        assert not isinstance(event, RequestFailed), event.error
        if isinstance(event, TokenOutput):
            outputs.setdefault(event.request_id, []).append(event)
    return outputs


def run_until_stalled(engine: Engine) -> list[EngineEvent]:
    """Step until only a call from outside could change anything; return all events."""
    events = engine.step()
    while not engine.is_stalled:
        events += engine.step()
    return events


def token_ids_of(outputs: Sequence[TokenOutput]) -> list[int]:
    return [output.token_id for output in outputs]


def naive_generate(
    prompt_token_ids: list[int],
    params: SamplingParams,
    vocab_size: int = 40,
    max_model_len: int = 200,
) -> list[int]:
    """What MemoryRunner's model says, one token at a time, without any engine."""
    sampler = Sampler(frozenset({EOS}))
    request = Request("naive", prompt_token_ids, params)
    while True:
        [token] = sampler.sample(
            logits_after(request.token_ids, vocab_size)[None], [NextToken.of(request)]
        )
        assert token is not None
        request.append(token.token_id, 0.0)
        if request.finish_reason(frozenset({EOS}), max_model_len) is not None:
            return request.output_token_ids
