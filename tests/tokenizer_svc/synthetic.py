"""Small tokenizers and model folders, made on the spot."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from tokenizer_svc.guarded_tokenizer import load_tokenizer
from tokenizer_svc.vocabulary import Vocabulary

CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>")

Json = dict[str, Any]


def bytes_tokenizer(
    control_tokens: tuple[str, ...] = CONTROL_TOKENS, bos_token: str | None = None
) -> Json:
    """One token per byte, so that every character of several bytes is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in control_tokens])
    if bos_token is not None:
        bos_id = id_of(tokenizer, bos_token)
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos_token} $A", special_tokens=[(bos_token, bos_id)]
        )
    return as_json(tokenizer)


def sentencepiece_tokenizer() -> Json:
    """As Llama 2's: spaces become ▁, one is put in front, unknown characters are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += ["H", "e", "l", "o", "w", "r", "d", "i", "n", "!", ",", "1", "2"]
    merges = [("l", "l"), ("H", "e"), ("▁", "w"), ("o", "r"), ("▁w", "or"), ("▁", "▁")]
    pieces += ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return as_json(tokenizer)


def unigram_tokenizer() -> Json:
    """A vocabulary that holds its control tokens as pieces, which plain text could match."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0)]
    pieces += [(char, -3.0) for char in "abcdefghijklmnopqrstuvwxyz<>/|"]
    tokenizer = Tokenizer(models.Unigram(vocab=pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return as_json(tokenizer)


def as_json(tokenizer: Tokenizer) -> Json:
    parsed: Json = json.loads(tokenizer.to_str())
    return parsed


def write_model(
    folder: Path,
    tokenizer: Json,
    *,
    chat_template: str | None = None,
    special_tokens: dict[str, str] | None = None,
    config: Json | None = None,
    generation_config: Json | None = None,
) -> Path:
    """A model folder without weights: what the tokenizer service reads."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = Tokenizer.from_str(json.dumps(tokenizer)).get_vocab_size()
    values: Json = {"vocab_size": vocab_size, "max_position_embeddings": 512, "eos_token_id": 1}
    tokenizer_config: Json = dict(special_tokens or {})
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    files: dict[str, Json | None] = {
        "tokenizer.json": tokenizer,
        "config.json": values | (config or {}),
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": generation_config,
    }
    for name, content in files.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def vocabulary_of(tokenizer_json: Json, size: int | None = None) -> tuple[Tokenizer, Vocabulary]:
    tokenizer = load_tokenizer(tokenizer_json)
    return tokenizer, Vocabulary(tokenizer, tokenizer_json, size or tokenizer.get_vocab_size())


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text alone, control tokens that it spells included."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id
