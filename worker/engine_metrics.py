"""An engine's numbers on /metrics, as it counts them itself."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from engine.loop import EngineLoop
from engine.reports import EngineStats
from engine.speculation import DraftCounts
from mesh import metrics
from mesh.instruments import WatchedCounter
from worker.spans import StepObserver

_WATCHED = {
    "num_running": metrics.NUM_RUNNING,
    "num_waiting_tokens": metrics.NUM_WAITING_TOKENS,
    "num_blocks": metrics.NUM_BLOCKS,
    "num_free_blocks": metrics.NUM_FREE_BLOCKS,
    "num_leases": metrics.NUM_LEASES,
    "num_steps": metrics.STEPS,
    "num_invalid_logits": metrics.INVALID_LOGITS,
    "num_preemptions": metrics.PREEMPTIONS,
    "num_recomputed_tokens": metrics.RECOMPUTED_TOKENS,
    "num_prefix_cache_queries": metrics.PREFIX_CACHE_QUERIES,
    "num_prefix_cache_hits": metrics.PREFIX_CACHE_HITS,
    "num_external_queries": metrics.EXTERNAL_CACHE_QUERIES,
    "num_external_hits": metrics.EXTERNAL_CACHE_HITS,
}
# Those that are parts of one whole.
_WATCHED_PARTS = (
    ("num_waiting_for_room", metrics.NUM_WAITING, {"reason": "capacity"}),
    ("num_waiting_for_kv", metrics.NUM_WAITING, {"reason": "deferred"}),
    ("num_computed_prompt_tokens", metrics.PROMPT_TOKENS, {"source": "local_compute"}),
    ("num_cached_prompt_tokens", metrics.PROMPT_TOKENS, {"source": "local_cache_hit"}),
    ("num_external_prompt_tokens", metrics.PROMPT_TOKENS, {"source": "external_kv_transfer"}),
)


@contextmanager
def watched_engine(engine: EngineLoop, model: str, block_size: int) -> Iterator[None]:
    """Report what `engine` does for as long as the block lasts."""
    metrics.MODELS.allow(model)
    layout = {"block_size": str(block_size), "num_blocks": str(engine.load().num_blocks)}
    metrics.CACHE_BLOCK_SIZES.allow(layout["block_size"])
    metrics.CACHE_SIZES.allow(layout["num_blocks"])
    for rare in (metrics.LEASE_EXPIRIES, metrics.KV_TRANSFER_FAILURES, metrics.UNRELEASED_HANDLES):
        rare.begin()
    engine.observe_steps(StepObserver())
    with ExitStack() as stack:
        for field, instrument in _WATCHED.items():
            stack.callback(instrument.watch(partial(_read, engine.load, field)))
        _watch_drafts(engine, stack)
        for field, part, labels in _WATCHED_PARTS:
            stack.callback(part.watch(partial(_read, engine.load, field), labels))
        stack.callback(metrics.KV_CACHE_USAGE.watch(lambda: kv_cache_usage(engine.load())))
        stack.callback(metrics.KV_CACHE_CONFIG.watch(lambda: 1, layout))
        stack.callback(metrics.STEP_AGE.watch(lambda: engine.last_step_age_s))
        yield


def _watch_drafts(engine: EngineLoop, stack: ExitStack) -> None:
    def watch(counter: WatchedCounter, read: Callable[[DraftCounts], float]) -> None:
        stack.callback(counter.watch(lambda: read(engine.load().drafts)))

    watch(metrics.SPECULATION_DRAFTS, lambda drafts: drafts.num_drafts)
    watch(metrics.SPECULATION_DRAFT_TOKENS, lambda drafts: drafts.num_draft_tokens)
    watch(metrics.SPECULATION_ACCEPTED_TOKENS, lambda drafts: drafts.num_accepted_tokens)
    for position in range(len(engine.load().drafts.num_accepted_per_position)):
        read = partial(_read_accepted, engine.load, position)
        labels = {"position": str(position)}
        stack.callback(metrics.SPECULATION_ACCEPTED_TOKENS_PER_POSITION.watch(read, labels))


def _read_accepted(load: Callable[[], EngineStats], position: int) -> float:
    return load().drafts.num_accepted_per_position[position]


def kv_cache_usage(stats: EngineStats) -> float:
    """The share of the blocks that somebody holds."""
    return 1 - stats.num_free_blocks / stats.num_blocks


def _read(load: Callable[[], EngineStats], field: str) -> float:
    return float(getattr(load(), field))
