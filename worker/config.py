"""Settings that prefill and decode workers share."""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from engine.config import (
    MIB,
    BackendName,
    DtypeName,
    EngineConfig,
    KernelLevel,
    KvDtypeName,
    QuantizationName,
    SpeculationLimits,
    SpeculativeMethod,
)
from mesh.config import Address, ServiceConfig
from mesh.metrics import MAX_SPECULATIVE_TOKENS


class WorkerConfig(ServiceConfig):
    """One engine and its place in the mesh."""

    model: str = Field(min_length=1, description="name under which the model is served")
    model_path: Path = Field(description="folder with the model's safetensors and config.json")
    kv_transfer_address: Address = Field(
        "127.0.0.1:50060",
        description="this machine's KV transfer agent; other machines' agents call it so too",
    )
    advertise_host: str | None = Field(
        None, description="host under which others reach this worker; by default the listen host"
    )
    device: str = Field("cpu", description="where the model runs, as torch names it")
    backend: BackendName | Literal["auto"] = Field(
        "auto", description="what computes; auto is the compiled kernels where they can"
    )
    kernel_level: KernelLevel | Literal["auto"] = Field(
        "auto",
        description="instructions that the compiled kernels use; auto is the best that the CPU has."
        " A format's results are the same at every level",
    )
    dtype: DtypeName | Literal["auto"] = Field(
        "auto", description="of weights that are not quantized; auto is what the checkpoint stores"
    )
    quantization: QuantizationName | Literal["auto"] = Field(
        "auto",
        description="of the weights, the same in all workers of a model; auto is what the"
        " checkpoint is quantized to or was made from (int4_channel where the CPU has AMX), or"
        " none",
    )
    kv_cache_dtype: KvDtypeName | Literal["auto"] = Field(
        "auto", description="of keys and values; auto is dtype, or bfloat16 with quantized weights"
    )
    packed_weights_dir: Path | None = Field(
        None, description="where packed weights are kept; by default in the model's folder"
    )
    block_size: int = Field(16, ge=1, le=1024, description="tokens in a KV block")
    num_blocks: int | None = Field(
        None, ge=1, description="KV blocks; by default as many as kv_cache_memory_bytes holds"
    )
    kv_cache_memory_bytes: int = Field(288 * MIB, ge=1, description="memory for the KV cache")
    max_num_seqs: int = Field(32, ge=1, description="requests that run at the same time")
    max_num_batched_tokens: int = Field(
        256, ge=1, description="tokens in one step, over all requests"
    )
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="longest chunk of one prompt while other requests run; 0 is no limit"
    )
    step_objective_ms: float = Field(
        25,
        ge=0,
        description="a step with decodes should take no longer: of long prompts beside them it"
        " computes some layers only, but whole ones that take 2.5 times as long go in one step;"
        " 0 is no limit",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="longest sequence; by default what the model was made for"
    )
    speculative_method: SpeculativeMethod | Literal["auto"] = Field(
        "auto",
        description="guess tokens from what came before, and compute the guesses in one step;"
        " auto is ngram with the compiled kernels, which give the same tokens with it",
    )
    num_speculative_tokens: int = Field(
        7, ge=1, le=MAX_SPECULATIVE_TOKENS, description="tokens guessed at once, at most"
    )
    prompt_lookup_min: int = Field(
        2, ge=1, description="last tokens that have to be found again for a guess, at least"
    )
    prompt_lookup_max: int = Field(
        4, ge=1, description="last tokens that are looked for, at most; more found is a surer guess"
    )
    max_num_waiting: int = Field(256, ge=1, description="requests that may wait for room")
    enable_prefix_caching: bool = Field(True, description="reuse the KV of equal prompt beginnings")
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of a forward pass; by default one per core"
    )
    use_kv_tiers: bool = Field(
        True, description="fill the transfer agent's colder tiers, and ask them before computing"
    )
    segment_dir: Path = Field(
        Path("/dev/shm"), description="where the KV cache's shared-memory file is made"
    )
    segment_prefix: str = Field(
        "pdmesh-", pattern=r"^[^/]+$", description="what that file's name begins with"
    )
    os_priority: int = Field(
        0, ge=0, le=19, description="the process's nice value; higher gives way to others"
    )
    stall_timeout_s: float = Field(
        60.0, gt=0, description="unhealthy after so long with requests but no finished step"
    )

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        host = self.listen.rpartition(":")[0]
        if host in ("0.0.0.0", "[::]") and self.advertise_host is None:
            raise ValueError(f"listening on {host} needs advertise_host: others cannot call {host}")
        return self

    @model_validator(mode="after")
    def _can_decode(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs,"
                f" {self.max_num_seqs}: each running request needs a token of a step"
            )
        return self

    @model_validator(mode="after")
    def _can_look_up(self) -> Self:
        # It checks what belongs together.
        _ = self._speculation
        return self

    @property
    def _speculation(self) -> SpeculationLimits:
        return SpeculationLimits(
            self.num_speculative_tokens, self.prompt_lookup_min, self.prompt_lookup_max
        )

    @property
    def own_segment_prefix(self) -> str:
        """Begins the names of this worker's segments, an incarnation ends them."""
        return f"{self.segment_prefix}{self.worker_id}-"

    def segment_path(self, incarnation: str) -> Path:
        return self.segment_dir / f"{self.own_segment_prefix}{incarnation}"

    def engine_config(self, incarnation: str) -> EngineConfig:
        path = self.segment_path(incarnation)
        return EngineConfig(
            model_path=self.model_path,
            device=self.device,
            backend=self.backend,
            kernel_level=self.kernel_level,
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            packed_weights_dir=self.packed_weights_dir,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            step_objective_ms=self.step_objective_ms,
            max_model_len=self.max_model_len,
            speculative_method=self.speculative_method,
            speculation=self._speculation,
            enable_prefix_caching=self.enable_prefix_caching,
            max_num_waiting=self.max_num_waiting,
            num_threads=self.num_threads,
            # A transfer agent can map host memory only.
            segment_path=os.fspath(path) if self.device == "cpu" else None,
        )
