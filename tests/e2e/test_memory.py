"""What a worker holds beside its weights and its KV cache."""

import psutil
import pytest

from tests.e2e.harness import RunningMesh

MIB = 1 << 20
# Interpreter, libraries, buffers of a step; the bound is for a worker that has served.
MAX_OTHER_BYTES = 400 * MIB


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_holds_its_weights_its_kv_and_little_else(mesh: RunningMesh, role: str) -> None:
    with mesh.client(timeout=60) as client:
        client.completions.create(
            model="smollm2-135m-instruct", prompt="The capital of France is", max_tokens=8
        )

    for worker in mesh.services(role):
        process = psutil.Process(worker["pid"])
        # Mapped files: the packed weights, and the segment of the KV cache.
        mapped = {
            kind: sum(each.rss for each in process.memory_maps() if part in each.path)
            for kind, part in (("weights", "/.packed/"), ("kv", "/dev/shm/"))
        }
        assert mapped["weights"] > 80 * MIB
        assert mapped["kv"] > 300 * MIB
        other = process.memory_info().rss - sum(mapped.values())
        assert other <= MAX_OTHER_BYTES, f"{worker['name']}: {other / MIB:.0f} MiB"
