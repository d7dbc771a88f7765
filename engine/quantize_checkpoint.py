"""`python -m engine.quantize_checkpoint SOURCE TARGET --quantization …`: quantized safetensors.

What an engine that loads TARGET computes is what it computes when it quantizes SOURCE at start.
"""

import argparse
import json
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
import numpy.typing as npt

from engine.config import ModelConfig, ModelError
from engine.kernels.formats import WeightFormat
from engine.kernels.native_llama import in_format
from engine.kernels.quantize import MatrixWeights
from engine.loader import EMBEDDING, LM_HEAD, LoadError
from engine.models.native_weights import source_weights
from engine.quantization_config import config_of
from engine.quantized_layouts import pack_words

QuantizedName = Literal["int8", "int4"]
Array = npt.NDArray[Any]

_DTYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}
_WEIGHTS = "model.safetensors"


def quantize_checkpoint(source: Path, target: Path, name: QuantizedName) -> None:
    """Write the model at `source` into the folder `target`, which must be empty."""
    config = ModelConfig.from_folder(source)
    if config.quantization is not None:
        raise LoadError(f"{source}: is quantized to {config.quantization.weights} already")
    for path in (*source.glob("*.json"), *source.glob("*.jinja")):
        # The index describes files that are not taken along, the manifest files as they were.
        if path.name not in ("model.safetensors.index.json", "pdmesh-manifest.json"):
            shutil.copyfile(path, target / path.name)
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    values["quantization_config"] = config_of(name)
    text = json.dumps(values, indent=2, ensure_ascii=False)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")
    with (target / _WEIGHTS).open("wb") as file:
        _write_safetensors(file, _tensors(source, config, name), target)


def _tensors(source: Path, config: ModelConfig, name: QuantizedName) -> Iterator[tuple[str, Array]]:
    """Yield the quantized model's tensors, one matrix in memory at a time."""
    weights = source_weights(source, config, name)
    matrix_format = WeightFormat.from_name(name)
    # As engine.kernels.native_llama.pack_model has it.
    is_int4 = matrix_format is WeightFormat.INT4
    embedding_format = WeightFormat.INT8_GROUPED if is_int4 else matrix_format
    for key in weights:
        if key == LM_HEAD and config.tie_word_embeddings:
            continue
        weight = weights[key]
        if not isinstance(weight, MatrixWeights) and weight.ndim == 1:
            yield key, np.ascontiguousarray(weight, dtype=np.float32)
            continue
        as_format = embedding_format if key in (EMBEDDING, LM_HEAD) else matrix_format
        for part, array in _parts(in_format(weight, as_format)):
            yield f"{key.removesuffix('weight')}{part}", array


def _parts(matrix: MatrixWeights) -> Iterator[tuple[str, Array]]:
    """Name a matrix's tensors: see engine.quantized_layouts."""
    assert matrix.scales is not None
    if matrix.format is WeightFormat.INT4:
        assert matrix.minimums is not None
        yield "weight_packed", pack_words(matrix.values)
        yield "weight_scale", matrix.scales
        yield "weight_minimum", matrix.minimums
        yield "weight_shape", np.array(matrix.shape, dtype=np.int64)
    else:
        yield "weight", matrix.values
        yield "weight_scale", matrix.scales.reshape(len(matrix.scales), -1)


def _write_safetensors(file: BinaryIO, tensors: Iterator[tuple[str, Array]], folder: Path) -> None:
    """Write tensors as they come; the header, which is first in the file, is known last."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    with tempfile.TemporaryFile(dir=folder) as data:
        for name, array in tensors:
            begin, end = end, end + array.nbytes
            header[name] = {
                "dtype": _DTYPES[array.dtype],
                "shape": list(array.shape),
                "data_offsets": [begin, end],
            }
            data.write(np.ascontiguousarray(array).data)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file.write(struct.pack("<Q", len(text)) + text)
        data.seek(0)
        shutil.copyfileobj(data, file)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.quantize_checkpoint")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--quantization", choices=get_args(QuantizedName), required=True)
    arguments = parser.parse_args()
    try:
        quantize_checkpoint(arguments.source, arguments.target, arguments.quantization)
    except (ModelError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
