"""How busy an engine was while one request's tokens came."""

from worker.engine_metrics import kv_cache_usage
from worker.engine_port import EnginePort


class LoadSamples:
    """One sample for each message of the request; numbers of 0 while there are none."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._num_samples = 0
        self._sum_batch_sizes = 0
        self.max_kv_cache_usage = 0.0

    def take(self) -> None:
        stats = self._engine.load()
        self._num_samples += 1
        # The request is one of them, even if it has just left.
        self._sum_batch_sizes += max(1, stats.num_running)
        self.max_kv_cache_usage = max(self.max_kv_cache_usage, kv_cache_usage(stats))

    @property
    def mean_batch_size(self) -> float:
        return self._sum_batch_sizes / self._num_samples if self._num_samples else 0.0

    def attributes(self) -> dict[str, float]:
        """For the request's span."""
        return {
            "pdmesh.mean_batch_size": self.mean_batch_size,
            "pdmesh.max_kv_cache_usage": self.max_kv_cache_usage,
        }
