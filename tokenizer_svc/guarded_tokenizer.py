"""A tokenizer in which no text of a request can spell a control token."""

import copy
import json
import secrets
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from tokenizer_svc.control_tokens import is_control_token

_PRIVATE_USE = "\U000f0000"


def choose_sealed_spellings(tokenizer_json: Mapping[str, Any]) -> dict[str, str]:
    """A spelling for each control token that nobody outside this process can know."""
    return {
        token["content"]: f"{_PRIVATE_USE}{secrets.token_hex(16)}{_PRIVATE_USE}"
        for token in tokenizer_json.get("added_tokens", ())
        if is_control_token(token["content"], token["special"])
    }


def seal_tokenizer(tokenizer_json: Mapping[str, Any], sealed: Mapping[str, str]) -> Tokenizer:
    """The same tokenizer, except that control tokens go by their sealed spelling.

    One pass then encodes a template's control tokens as such and all other text as
    text, with the boundaries that the original tokenizer would see.
    """
    changed = copy.deepcopy(dict(tokenizer_json))
    for token in changed.get("added_tokens", ()):
        token["content"] = sealed.get(token["content"], token["content"])
    model = changed["model"]
    model["vocab"] = _rename(model["vocab"], sealed)
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = sealed.get(model["unk_token"], model["unk_token"])
    return load_tokenizer(changed)


def load_tokenizer(tokenizer_json: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer as described, but without truncation and padding."""
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json))
    # Some files carry the settings of a training run; a prompt is never cut in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _rename(vocab: Any, sealed: Mapping[str, str]) -> Any:
    if isinstance(vocab, dict):
        return {sealed.get(token, token): token_id for token, token_id in vocab.items()}
    # Unigram: a list of [piece, score], in the order of ids.
    return [[sealed.get(piece, piece), score] for piece, score in vocab]
