"""What a worker holds beside its weights and its KV cache."""

from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import RunningMesh
from worker.config import WorkerConfig

MIB = 1 << 20
# Interpreter, libraries, buffers of a step; the bound is for a worker that has served.
MAX_OTHER_BYTES = 400 * MIB


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_holds_its_weights_its_kv_and_little_else(
    mesh: RunningMesh, role: str, smollm2_path: Path
) -> None:
    [weights] = (smollm2_path / ".packed").glob("int4-*")
    with mesh.client(timeout=60) as client:
        client.completions.create(
            model="smollm2-135m-instruct", prompt="The capital of France is", max_tokens=8
        )

    for worker in mesh.records(role):
        process = psutil.Process(worker.pid)
        kv_bytes = sum(each.rss for each in process.memory_maps() if "/dev/shm/" in each.path)
        # All of it but what is less than a block.
        assert kv_bytes > 0.99 * WorkerConfig.model_fields["kv_cache_memory_bytes"].default
        other = process.memory_info().rss - kv_bytes - weights.stat().st_size
        assert other <= MAX_OTHER_BYTES, f"{worker.name}: {other / MIB:.0f} MiB"
