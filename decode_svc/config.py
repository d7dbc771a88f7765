"""Settings of a decode worker."""

from typing import ClassVar

from pydantic import Field

from worker.config import WorkerConfig


class DecodeConfig(WorkerConfig):
    """How long a prefill worker's KV is waited for before the prompt is computed here."""

    service: ClassVar[str] = "decode"

    kv_pull_timeout_s: float = Field(
        10.0, gt=0, description="bound of one KV transfer, from the end of its prefill on"
    )
    kv_release_timeout_s: float = Field(
        2.0, gt=0, description="bound of asking the prefill worker whether its lease held"
    )
