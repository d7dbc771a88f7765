"""Parameters that OpenAI or vLLM know and this mesh does not implement."""

from collections.abc import Callable, Mapping
from typing import Any

from mesh.errors import UnsupportedParameter

_IsOff = Callable[[Any], bool]


def refuse_unsupported(payload: Mapping[str, Any], table: Mapping[str, _IsOff]) -> None:
    """Refuse a parameter that would have an effect; one that is switched off passes."""
    for name, is_off in table.items():
        value = payload.get(name)
        if value is not None and not is_off(value):
            raise UnsupportedParameter(f"{name} is not supported by this server", param=name)


def _empty(value: Any) -> bool:
    return value in ([], {}, "")


def _one_of(*allowed: Any) -> _IsOff:
    # 1 == True in Python: types must agree too.
    return lambda value: any(value == one and type(value) is type(one) for one in allowed)


def _text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


_BOTH: dict[str, _IsOff] = {
    "allowed_token_ids": _empty,
    "detokenize": _one_of(True),
    "early_stopping": _one_of(False),
    "guided_choice": _empty,
    "guided_decoding_backend": _empty,
    "guided_grammar": _empty,
    "guided_json": _empty,
    "guided_regex": _empty,
    "guided_whitespace_pattern": _empty,
    "kv_transfer_params": _empty,
    "length_penalty": _one_of(1, 1.0),
    "logit_processors": _empty,
    "logits_processors": _empty,
    "prompt_cache_retention": _one_of("in-memory", "in_memory"),
    "prompt_embeds": _empty,
    "prompt_logprobs": _one_of(False),
    "response_format": _text_format,
    "return_token_ids": _one_of(False),
    "return_tokens_as_token_ids": _one_of(False),
    "spaces_between_special_tokens": _one_of(True),
    "store": _one_of(False),
    "structural_tag": _empty,
    "structured_outputs": _empty,
    "truncate_prompt_tokens": lambda value: False,
    "use_beam_search": _one_of(False),
    "vllm_xargs": _empty,
}

# Of whatever takes messages.
_MESSAGES: dict[str, _IsOff] = {
    "chat_template": _empty,
    "media_io_kwargs": _empty,
    "mm_processor_kwargs": _empty,
}

TOKENIZE_CHAT = _MESSAGES

CHAT: dict[str, _IsOff] = {
    **_BOTH,
    **_MESSAGES,
    # Templates write them themselves.
    "add_special_tokens": _one_of(False),
    "audio": _empty,
    "best_of": _one_of(1),
    "documents": _empty,
    "echo": _one_of(False),
    "function_call": _one_of("none", "auto"),
    "functions": _empty,
    "include_reasoning": _one_of(False),
    "modalities": lambda value: value in ([], ["text"]),
    "moderation": _empty,
    # No answer calls a tool, let alone several at once.
    "parallel_tool_calls": _one_of(True, False),
    "prediction": _empty,
    "prompt_cache_options": lambda value: value in ({}, {"mode": "implicit"}),
    "reasoning_effort": _one_of("none"),
    "thinking_token_budget": lambda value: False,
    "tool_choice": _one_of("none", "auto"),
    "verbosity": _one_of("medium"),
    "web_search_options": lambda value: False,
}

COMPLETIONS: dict[str, _IsOff] = {
    **_BOTH,
    # A tokenizer adds what its own configuration says.
    "add_special_tokens": _one_of(True),
    # More candidates than choices would mean throwing some away.
    "best_of": _one_of(1),
    "suffix": _empty,
}
