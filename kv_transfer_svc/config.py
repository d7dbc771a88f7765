"""Settings of the KV transfer agent."""

from typing import ClassVar

from pydantic import Field

from mesh.config import ServiceConfig


class KvTransferConfig(ServiceConfig):
    """What an agent can be told."""

    service: ClassVar[str] = "kv_transfer"

    num_copy_threads: int = Field(
        2, ge=1, le=64, description="copies between segments that run at the same time"
    )
