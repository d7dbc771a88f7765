"""Settings of the KV transfer agent."""

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from kv_transfer_svc.tls import TlsFiles
from mesh.config import Address, ServiceConfig


class KvTransferConfig(ServiceConfig):
    """What an agent can be told."""

    service: ClassVar[str] = "kv_transfer"

    num_copy_threads: int = Field(
        2, ge=1, le=64, description="copies between segments that run at the same time"
    )
    data_port: int = Field(
        0, ge=0, le=65535, description="TCP port for other machines' agents; 0 is any free one"
    )
    num_streams: int = Field(
        4,
        ge=1,
        le=64,
        description="connections over which one pull from another machine runs; one that follows "
        "a prefill takes one",
    )
    connect_timeout_s: float = Field(
        2.0, gt=0, le=3600, description="bound of connecting to another machine's data port"
    )
    stall_timeout_s: float = Field(
        5.0,
        gt=0,
        le=3600,
        description="a transfer between machines fails after so long without a byte",
    )
    host_memory_bytes: int = Field(
        256 << 20, ge=0, description="host memory for copies of KV blocks; 0 is no such tier"
    )
    disk_path: Path | None = Field(
        None, description="folder for KV blocks that outlive the process; without it none do"
    )
    disk_bytes: int = Field(2 << 30, ge=1, description="what disk_path may grow to")
    advertise_address: Address | None = Field(
        None,
        description="address under which workers know this agent, their kv_transfer_address to the"
        " letter; by default its own",
    )
    tls_certificate: Path | None = Field(
        None, description="PEM certificate shown to other agents; all three files or none"
    )
    tls_key: Path | None = Field(None, description="PEM key of tls_certificate")
    tls_authority: Path | None = Field(
        None, description="PEM certificates of those who may vouch for other agents"
    )

    remote_transport: Literal["tcp", "mooncake"] = Field(
        "tcp",
        description="how blocks come from other machines; mooncake is its Transfer Engine, used "
        "between agents that both have it",
    )
    mooncake_protocol: Literal["tcp", "rdma"] = Field(
        "tcp", description="what the Transfer Engine runs over"
    )
    mooncake_device: str = Field("", description="RDMA devices for it, by comma; empty is all")

    @model_validator(mode="after")
    def _is_known_as_it_is_called(self) -> Self:
        host = self.listen.rpartition(":")[0]
        if host in ("0.0.0.0", "[::]") and self.advertise_address is None:
            raise ValueError(
                f"listening on {host} needs advertise_address: workers' kv_transfer_address, by "
                "which they find what the host and disk tiers hold"
            )
        return self

    @model_validator(mode="after")
    def _mooncake_is_trusted(self) -> Self:
        if self.remote_transport == "mooncake" and self.tls_certificate:
            raise ValueError("remote_transport mooncake has no TLS: leave out the tls_ files")
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        files = (self.tls_certificate, self.tls_key, self.tls_authority)
        if any(files) and not all(files):
            raise ValueError("tls_certificate, tls_key and tls_authority belong together")
        return self

    @property
    def tls(self) -> TlsFiles | None:
        if self.tls_certificate and self.tls_key and self.tls_authority:
            return TlsFiles(self.tls_certificate, self.tls_key, self.tls_authority)
        return None

    @property
    def listen_host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")
