"""From a model folder to checked, memory-mapped weights; safetensors only, never pickle."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from checkpoint.folder import (
    TOKENIZER,
    InvalidFolder,
    check_tokenizer,
    placed_tensors,
    weight_files,
)
from engine.config import ModelConfig, ModelError
from engine.quantized_layouts import LayoutError, Weight, as_float32, read_weights
from engine.safetensors_file import (
    FLOAT_DTYPES,
    SafetensorsError,
    StoredDtype,
    StoredTensor,
    map_tensors,
    read_header,
)

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

_NUM_READERS = 8


class LoadError(ModelError):
    """A file of the model folder is missing, damaged or does not fit the others."""


class WeightsError(ModelError):
    """The weights do not fit config.json."""


def load_weights(folder: Path, config: ModelConfig) -> dict[str, Weight]:
    """Return the weights by their Hugging Face names, with `lm_head.weight` always among them.

    Floats stay mapped from the file, so that the workers of a machine share one copy in memory.
    """
    with _load_errors(folder):
        weights = read_weights(_read_folder(folder), config.quantization)
        _tie_embeddings(folder, config, weights)
        # Prompts may come as ids: then there is none, and none is needed.
        if (folder / TOKENIZER).exists():
            check_tokenizer(folder, weights[EMBEDDING].shape[0])
    return weights


def stored_dtype(folder: Path) -> StoredDtype:
    """Return what floats are stored as: what config.json says about it does not count."""
    with _load_errors(folder):
        headers = [read_header(path) for path in weight_files(folder)]
    for name in (EMBEDDING, LM_HEAD):
        for entries in headers:
            if name in entries:
                stored = entries[name].dtype
                # Scales are what is left of the floats of a quantized matrix.
                return stored if stored in FLOAT_DTYPES else "float32"
    raise LoadError(f"{folder}: neither {EMBEDDING} nor {LM_HEAD}")


def check_weights(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless the weights are exactly those that the config describes."""
    expected = dict(expected_shapes(config))
    for name, shape in expected.items():
        if name not in shapes:
            raise WeightsError(f"{name} is missing from the weights")
        if shapes[name] != shape:
            actual = list(shapes[name])
            raise WeightsError(f"{name} has shape {actual}, config.json implies {list(shape)}")
    for name in shapes:
        # Old checkpoints store the rotary frequencies, which the config determines.
        if name not in expected and not name.endswith("rotary_emb.inv_freq"):
            raise WeightsError(f"{name} is a tensor that config.json has no place for")


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor of the model."""
    yield EMBEDDING, (config.vocab_size, config.hidden_size)
    yield LM_HEAD, (config.vocab_size, config.hidden_size)
    yield "model.norm.weight", (config.hidden_size,)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (config.hidden_size,)
        yield f"{layer}.post_attention_layernorm.weight", (config.hidden_size,)
        for name, (num_rows, num_columns, has_bias) in _matrices(config).items():
            yield f"{layer}.{name}.weight", (num_rows, num_columns)
            if has_bias:
                yield f"{layer}.{name}.bias", (num_rows,)


def _matrices(config: ModelConfig) -> dict[str, tuple[int, int, bool]]:
    """Name each matrix of a layer with its rows, its columns and whether it has a bias."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    return {
        "self_attn.q_proj": (query, hidden, config.attention_bias),
        "self_attn.k_proj": (key, hidden, config.attention_bias),
        "self_attn.v_proj": (key, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, query, config.attention_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }


def _read_folder(folder: Path) -> dict[str, StoredTensor]:
    paths = weight_files(folder)
    # The headers of a large model's shards are megabytes of JSON each, on what may be a slow disk.
    with ThreadPoolExecutor(max_workers=_NUM_READERS) as threads:
        mapped = threads.map(map_tensors, paths)
        files = dict(zip((path.name for path in paths), mapped, strict=True))
    return {name: files[file][name] for name, file in placed_tensors(folder, files).items()}


@contextmanager
def _load_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorsError, InvalidFolder) as error:
        raise LoadError(str(error)) from None
    except LayoutError as error:
        raise LoadError(f"{folder}: {error}") from None


def _tie_embeddings(folder: Path, config: ModelConfig, weights: dict[str, Weight]) -> None:
    """Leave both the embedding and the output head in `weights`, or raise."""
    embedding, lm_head = weights.get(EMBEDDING), weights.get(LM_HEAD)
    if not config.tie_word_embeddings:
        for name, tensor in ((EMBEDDING, embedding), (LM_HEAD, lm_head)):
            if tensor is None:
                raise LoadError(f"{folder}: no {name}, and tie_word_embeddings is false")
        return
    if embedding is None and lm_head is None:
        raise LoadError(f"{folder}: neither {EMBEDDING} nor {LM_HEAD}")
    if embedding is not None and lm_head is not None and not _are_equal(embedding, lm_head):
        raise LoadError(f"{folder}: tie_word_embeddings is true, but {LM_HEAD} differs")
    tied = embedding if embedding is not None else lm_head
    assert tied is not None
    weights[EMBEDDING] = weights[LM_HEAD] = tied


def _are_equal(a: Weight, b: Weight) -> bool:
    if isinstance(a, StoredTensor) and isinstance(b, StoredTensor):
        return a.equals(b)
    return np.array_equal(as_float32(a), as_float32(b))
