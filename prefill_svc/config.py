"""Settings of a prefill worker."""

from typing import ClassVar

from pydantic import Field

from worker.config import WorkerConfig


class PrefillConfig(WorkerConfig):
    """Prompts give way to running decodes: the default priority is lower."""

    service: ClassVar[str] = "prefill"

    lease_s: float = Field(
        30.0,
        gt=0,
        le=86_400,
        description="how long computed KV is kept for a decode worker that is silent",
    )
    os_priority: int = Field(
        5, ge=0, le=19, description="the process's nice value; higher gives way to others"
    )
