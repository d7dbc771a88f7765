"""Settings of the gateway."""

import ipaddress
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import AliasChoices, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import NoDecode

from mesh.config import Address, Addresses, ServiceConfig, split_commas

Origins = Annotated[list[str], NoDecode, BeforeValidator(split_commas)]

# What OpenTelemetry's variable may say besides a truth value, and whether spans get the text.
_CAPTURE_MODES = {
    "no_content": False,
    "span_only": True,
    "event_only": False,
    "span_and_event": True,
}


def _captures_content(value: object) -> object:
    return _CAPTURE_MODES.get(value.lower(), value) if isinstance(value, str) else value


class GatewayConfig(ServiceConfig):
    """Where the gateway listens, whom it asks, and how long it waits."""

    service: ClassVar[str] = "gateway"

    host: str = Field("127.0.0.1", min_length=1, description="interface of the REST API")
    port: int = Field(8000, ge=0, le=65535, description="port of the REST API; 0 picks a free one")
    inference_listen: Address = Field(
        "127.0.0.1:0", description="where InferenceService is served; port 0 picks a free one"
    )
    tokenizer_addresses: Addresses = Field(
        ["127.0.0.1:50051"], min_length=1, description="tokenizers, used in turn"
    )
    scheduler_addresses: Addresses = Field(
        ["127.0.0.1:50052"], min_length=1, description="schedulers, used in turn"
    )
    allow_unauthenticated: bool = Field(
        False, description="serve on an interface that others can reach, though there are no keys"
    )
    keys_path: Path | None = Field(
        None,
        description="file of API keys, see `pdmesh key`; once it exists, callers need a key",
    )
    keys_in_redis: bool = Field(
        False, description="API keys are in Redis instead of a file; callers need one in any case"
    )
    keys_check_interval_s: float = Field(
        1.0, gt=0, description="seconds between looks at whether API keys have changed"
    )
    cors_origins: Origins = Field(
        [],
        description="web origins whose pages may call the API (`https://app.example`; `*` is any); "
        "none by default",
    )

    limits_local_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description="part of each rate limit that one gateway allows by itself while Redis does "
        "not answer; 0 refuses callers that have limits",
    )
    limits_default_output_tokens: int = Field(
        256,
        ge=1,
        description="tokens that a request reserves for its answer where it names no maximum",
    )

    rules_path: Path | None = Field(
        None, description="file of parameter rules, see `pdmesh rules`; none without it"
    )
    rules_check_interval_s: float = Field(
        1.0, gt=0, description="seconds between looks at whether the rules file has changed"
    )

    max_body_bytes: int = Field(10 * 1024 * 1024, ge=1024, description="largest request body")
    max_header_bytes: int = Field(64 * 1024, ge=1024, description="largest request head")
    max_choices: int = Field(
        128, ge=1, le=4096, description="choices of one request, over all its prompts"
    )

    max_attempts: int = Field(
        3, ge=1, description="attempts to finish a choice when workers fail, first one included"
    )
    failover_wait_s: float = Field(
        15.0, ge=0, description="longest wait of a choice that lost its worker for another one"
    )
    reconnect_wait_s: float = Field(
        10.0, ge=0, description="how long to look for a tokenizer or scheduler that answers"
    )
    request_timeout_s: float = Field(1800.0, gt=0, description="longest life of a request")
    encode_timeout_s: float = Field(30.0, gt=0, description="longest wait for a tokenizer")
    queue_timeout_s: float = Field(60.0, gt=0, description="longest wait for a placement")
    start_timeout_s: float = Field(
        120.0, gt=0, description="longest wait for a worker's first sign of work on a request"
    )
    stall_timeout_s: float = Field(
        20.0, gt=0, description="longest silence between two tokens before a worker counts as hung"
    )
    max_connections: int = Field(
        4096, ge=1, description="open connections; more are answered 503 and closed"
    )
    max_concurrent_requests: int = Field(
        1024,
        ge=1,
        description="generations at a time, streams or not; more are answered 429 at once",
    )
    header_timeout_s: float = Field(
        10.0, gt=0, description="longest time that the head of a request may take to arrive"
    )
    body_timeout_s: float = Field(
        60.0, gt=0, description="longest time that the body of a request may take to arrive"
    )
    client_timeout_s: float = Field(
        60.0, gt=0, description="longest time a client may leave a full send buffer unread"
    )

    stream_header_wait_s: float = Field(
        10.0,
        ge=0,
        description="how long the headers of a stream wait for the first token, so that an "
        "error before it keeps its status; proxies with short timeouts want less",
    )
    keep_alive_interval_s: float = Field(
        10.0, gt=0, description="seconds between comments in a stream that waits"
    )
    health_interval_s: float = Field(1.0, gt=0, description="seconds between health checks")
    health_stall_s: float = Field(
        20.0, gt=0, description="a worker with running requests and no step for so long is stalled"
    )

    trace_content: Annotated[bool, BeforeValidator(_captures_content)] = Field(
        False,
        validation_alias=AliasChoices(
            "PDMESH_TRACE_CONTENT", "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
        ),
        description="put prompts and answers into the root span: whoever sees traces reads them",
    )

    dashboard_key: SecretStr | None = Field(
        None,
        description="opens /dashboard, as an admin API key does; with neither, only this machine "
        "may look",
    )
    dashboard_requests: int = Field(
        500, ge=1, le=100_000, description="finished requests that /dashboard remembers"
    )

    @model_validator(mode="after")
    def _refuse_strangers(self) -> Self:
        if self.allow_unauthenticated or self.has_keys:
            return self
        # The REST API and InferenceService are two doors to the same pipeline.
        inference_host = self.inference_listen.rpartition(":")[0].strip("[]")
        for name, host in (("host", self.host), ("inference_listen", inference_host)):
            if not _is_loopback(host):
                raise ValueError(
                    f"{name} {host!r} can be reached from other machines and there are no API "
                    "keys: make one with `pdmesh key add NAME` (see keys_path), use 127.0.0.1, or "
                    "set allow_unauthenticated"
                )
        return self

    @model_validator(mode="after")
    def _refuse_two_stores(self) -> Self:
        if self.keys_in_redis and self.keys_path is not None and self.keys_path.exists():
            raise ValueError(
                f"keys_in_redis is set and there are keys in {self.keys_path}: keep them in one "
                "place"
            )
        return self

    @property
    def has_keys(self) -> bool:
        """Callers need a key from the start."""
        return self.keys_in_redis or (self.keys_path is not None and self.keys_path.exists())


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
