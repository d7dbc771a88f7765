"""Loads what a model folder says about text: tokenizer, chat template, defaults."""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tokenizer_svc.chat_template import InvalidTemplate, TemplateSpec
from tokenizer_svc.guarded_tokenizer import choose_sealed_spellings, load_tokenizer, seal_tokenizer
from tokenizer_svc.length_bound import LengthBound, length_bound
from tokenizer_svc.renderer import RenderLimits, TemplateRenderer
from tokenizer_svc.vocabulary import Vocabulary

# Weights are padded by a few rows at most; a larger gap means another model's tokenizer.
_MIN_VOCAB_SHARE = 0.9


class InvalidModel(Exception):
    """The folder cannot be served; the message says what and where."""


@dataclass(frozen=True)
class SamplingDefaults:
    """What generation_config.json recommends; None where it is silent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, eq=False, repr=False)
class TokenizerModel:
    """One served model, as far as text is concerned."""

    name: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tokenizer_sha256: str
    sampling_defaults: SamplingDefaults
    created_at_s: int
    vocabulary: Vocabulary
    # Encodes control tokens that the text spells; for trusted callers.
    trusting_tokenizer: Tokenizer
    # Encodes every request's text.
    guarded_tokenizer: Tokenizer
    # None: a text's size says nothing about its tokens.
    length_bound: LengthBound | None
    # None: the model has no chat template.
    renderer: TemplateRenderer | None

    def close(self) -> None:
        """End the model's template processes."""
        if self.renderer is not None:
            self.renderer.close()


def load_model(
    name: str,
    folder: Path,
    render_limits: RenderLimits,
    *,
    max_prompt_chars: int = 1 << 24,
    max_model_len: int | None = None,
) -> TokenizerModel:
    """Read a Hugging Face folder and start its template processes; takes a second or so.

    `max_model_len` can only narrow the model's own window.

    Raises:
        InvalidModel: a file is missing or broken, or the tokenizer is not that of
            the weights.
    """
    config = _read_json(folder / "config.json")
    generation_config = _read_json(folder / "generation_config.json", optional=True)
    tokenizer_config = _read_json(folder / "tokenizer_config.json", optional=True)
    path = folder / "tokenizer.json"
    tokenizer_json = _read_json(path)
    sealed = choose_sealed_spellings(tokenizer_json)
    trusting, guarded = _load_tokenizers(path, tokenizer_json, sealed)
    vocab_size = _positive(config, "vocab_size", folder)
    window = _positive(config, "max_position_embeddings", folder)
    _check_vocab_size(path, trusting, vocab_size)
    special_tokens = _special_tokens(tokenizer_config)
    vocabulary = Vocabulary(trusting, tokenizer_json, vocab_size)
    return TokenizerModel(
        name=name,
        max_model_len=min(window, max_model_len or window),
        eos_token_ids=_eos_token_ids(config, generation_config, special_tokens, trusting, folder),
        bos_token_id=trusting.token_to_id(special_tokens.get("bos_token", "")),
        tokenizer_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        sampling_defaults=_sampling_defaults(generation_config, folder),
        created_at_s=int(time.time()),
        vocabulary=vocabulary,
        trusting_tokenizer=trusting,
        guarded_tokenizer=guarded,
        length_bound=length_bound(tokenizer_json, vocabulary),
        renderer=_start_renderer(
            folder, tokenizer_config, special_tokens, sealed, render_limits, max_prompt_chars
        ),
    )


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if optional:
            return {}
        raise InvalidModel(f"{path}: missing") from error
    except (OSError, ValueError) as error:
        raise InvalidModel(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidModel(f"{path}: expected a JSON object")
    return value


def _positive(config: Mapping[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidModel(f"{folder / 'config.json'}: {key} must be a positive integer")
    return value


def _load_tokenizers(
    path: Path, tokenizer_json: Mapping[str, Any], sealed: Mapping[str, str]
) -> tuple[Tokenizer, Tokenizer]:
    try:
        trusting, guarded = load_tokenizer(tokenizer_json), seal_tokenizer(tokenizer_json, sealed)
    except Exception as error:  # tokenizers raises plain Exception
        raise InvalidModel(f"{path}: not a tokenizer: {error}") from error
    # Guards the guard: a control token under another id would be another token.
    for content, spelling in sealed.items():
        if guarded.token_to_id(spelling) != trusting.token_to_id(content):
            raise InvalidModel(f"{path}: the control token {content!r} cannot be sealed")
        if guarded.token_to_id(content) is not None:
            raise InvalidModel(f"{path}: the control token {content!r} has two entries")
    return trusting, guarded


def _check_vocab_size(path: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    num_tokens = max(tokenizer.get_vocab().values(), default=-1) + 1
    if num_tokens > vocab_size:
        raise InvalidModel(
            f"{path}: has token ids up to {num_tokens - 1}, but the weights only {vocab_size}"
            " embeddings: it belongs to another model"
        )
    if num_tokens < vocab_size * _MIN_VOCAB_SHARE:
        raise InvalidModel(
            f"{path}: has {num_tokens} tokens, but the weights {vocab_size} embeddings: it"
            " belongs to another model"
        )


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like, which come as text or as an object that holds it."""
    tokens: dict[str, str] = {}
    for name, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _eos_token_ids(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    tokenizer: Tokenizer,
    folder: Path,
) -> tuple[int, ...]:
    for source in (generation_config, config):
        if (value := source.get("eos_token_id")) is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(i, int) and tokenizer.id_to_token(i) is not None for i in ids):
                raise InvalidModel(f"{folder}: eos_token_id {value} is not in the tokenizer")
            return tuple(ids)
    token_id = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    if token_id is None:
        raise InvalidModel(f"{folder}: no eos_token_id in generation_config.json or config.json")
    return (token_id,)


def _sampling_defaults(generation_config: Mapping[str, Any], folder: Path) -> SamplingDefaults:
    values = {field.name: generation_config.get(field.name) for field in fields(SamplingDefaults)}
    for name, value in values.items():
        kinds = (int,) if name == "top_k" else (int, float)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise InvalidModel(f"{folder / 'generation_config.json'}: {name} must be a number")
    return SamplingDefaults(**values)


def _start_renderer(
    folder: Path,
    tokenizer_config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    sealed: Mapping[str, str],
    limits: RenderLimits,
    max_prompt_chars: int,
) -> TemplateRenderer | None:
    sources = _template_sources(folder, tokenizer_config)
    if not sources:
        return None
    try:
        return TemplateRenderer(
            TemplateSpec(sources, special_tokens, sealed, max_prompt_chars), limits
        )
    except InvalidTemplate as error:
        raise InvalidModel(f"{folder}: the chat template does not compile: {error}") from error


def _template_sources(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name; a file wins over the entry in tokenizer_config.json."""
    value = tokenizer_config.get("chat_template")
    named = {"default": value} if isinstance(value, str) else _named_templates(value, folder)
    file = folder / "chat_template.jinja"
    if file.exists():
        named["default"] = file.read_text(encoding="utf-8")
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[extra.stem] = extra.read_text(encoding="utf-8")
    if named and "default" not in named:
        raise InvalidModel(f"{folder}: no chat template is called 'default'")
    return named


def _named_templates(value: Any, folder: Path) -> dict[str, str]:
    try:
        return {entry["name"]: entry["template"] for entry in value or ()}
    except (TypeError, KeyError) as error:
        raise InvalidModel(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither text nor a list of"
            " named templates"
        ) from error
