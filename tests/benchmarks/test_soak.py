"""Memory over many requests; `python -m benchmarks.soak` is the same with the default model."""

from pathlib import Path

from benchmarks.soak import growth, soak
from engine.config import EngineConfig
from tests.engine_runs import running_engine
from tests.tiny_llama import TINY, make_tiny_model

MIB = 1 << 20


def test_an_engine_s_memory_is_flat_over_requests(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    config = EngineConfig(tmp_path, num_blocks=80, num_threads=1)
    with running_engine(config) as engine:
        samples = list(soak(engine, 2000, TINY["vocab_size"]))
        assert engine.load().num_free_blocks == 80

    assert len(samples) >= 16
    # 2,000 requests that left a kilobyte each would be 1 MiB between the quarters.
    assert growth(samples) < 0.75 * MIB
    assert growth([MIB * index for index in range(20)]) > 5 * MIB
