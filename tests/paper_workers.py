"""Workers that exist on paper, and a registry that says what a test wants."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from mesh.registry import RegisteredWorker, WorkerLoad, WorkerRecord


def registered(
    worker_id: str,
    role: Literal["prefill", "decode"] = "decode",
    *,
    incarnation: str = "1",
    load: WorkerLoad | None = None,
    **changes: str | int | Mapping[str, str],
) -> RegisteredWorker:
    record = WorkerRecord(
        worker_id=worker_id,
        incarnation=incarnation,
        role=role,
        address=f"{worker_id}:1",
        model="smol",
        engine_id=f"{worker_id}-engine",
        transfer_address="127.0.0.1:9",
        layout_fingerprint="f1",
        block_size=16,
        num_blocks=100,
        max_model_len=1024,
        max_num_batched_tokens=256,
    )
    record = replace(record, **changes)  # type: ignore[arg-type]
    return RegisteredWorker(record, load or WorkerLoad(num_blocks=100, num_free_blocks=100))


class PaperRegistry:
    """Answers with `workers`, or fails with `error`."""

    def __init__(self, *workers: RegisteredWorker) -> None:
        self.workers = list(workers)
        self.error: Exception | None = None

    async def list(self) -> list[RegisteredWorker]:
        if self.error is not None:
            raise self.error
        return self.workers
