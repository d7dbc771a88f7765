"""Settings of the tokenizer service."""

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from mesh.client import DEFAULT_MAX_MESSAGE_BYTES
from mesh.config import ServiceConfig
from tokenizer_svc.renderer import RenderLimits


def _split_pairs(value: object) -> object:
    """`name=folder,name=folder`, as it may be written in the environment."""
    if not isinstance(value, str):
        return value
    pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
    if not all(name and folder for name, _, folder in pairs):
        raise ValueError("should be name=folder, separated by commas")
    return {name.strip(): folder.strip() for name, _, folder in pairs}


class TokenizerConfig(ServiceConfig):
    """What the tokenizer service can be told."""

    service: ClassVar[str] = "tokenizer"

    models: Annotated[dict[str, str], BeforeValidator(_split_pairs)] = Field(
        min_length=1, description="folder of each served model by name; the first is the default"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="the workers' window in tokens, where it is below the model's"
    )
    encode_threads: int = Field(2, ge=1, description="prompts encoded at once")
    max_waiting_encodes: int = Field(
        256, ge=0, description="prompts that may wait for a thread; more are refused"
    )
    max_bad_words: int = Field(256, ge=0, description="bad words in one request")
    max_stop_strings: int = Field(16, ge=0, description="stop strings of one sequence")
    max_stop_chars: int = Field(1024, ge=1, description="characters in one stop string")
    max_open_sequences: int = Field(
        4096, ge=1, description="sequences that one Detokenize call may hold open"
    )
    template_processes: int = Field(
        2, ge=1, description="processes that render each model's chat template"
    )
    template_timeout_s: float = Field(5.0, gt=0, description="time to render one chat")
    template_memory_bytes: int = Field(
        1 << 30, ge=1 << 27, description="address space of a process that renders chats"
    )
    max_message_bytes: int = Field(
        DEFAULT_MAX_MESSAGE_BYTES, ge=1 << 20, description="largest gRPC message, either way"
    )

    @property
    def render_limits(self) -> RenderLimits:
        return RenderLimits(
            num_processes=self.template_processes,
            timeout_s=self.template_timeout_s,
            memory_bytes=self.template_memory_bytes,
        )
