"""Reads a Llama-family GGUF file's own quantized values, without rounding them again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from engine.kernels.quantize import MatrixWeights, read_q4_1, read_q8_0

Array = npt.NDArray[Any]

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def read_gguf_weights(path: Path, num_heads: int, num_kv_heads: int) -> dict[str, Any]:
    """Weights under their Hugging Face names: Q4_1 and Q8_0 as they are, others in float32."""
    weights: dict[str, Any] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        name = _hugging_face_name(tensor.name)
        if name is None:
            continue
        weight = _read(tensor)
        if name.endswith("q_proj.weight"):
            weight = _unpermuted(weight, num_heads)
        if name.endswith("k_proj.weight"):
            weight = _unpermuted(weight, num_kv_heads)
        weights[name] = weight
    return weights


def dequantized(weights: Mapping[str, Any]) -> dict[str, Array]:
    """The same weights in float32."""
    return {
        name: weight.dequantize() if isinstance(weight, MatrixWeights) else weight
        for name, weight in weights.items()
    }


def _hugging_face_name(name: str) -> str | None:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    layer_name = _LAYER_NAMES.get(rest.removesuffix(".weight"))
    return f"model.layers.{block}.{layer_name}.weight" if layer_name else None


def _read(tensor: Any) -> Any:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    kind = gguf.GGMLQuantizationType
    if tensor.tensor_type == kind.Q4_1:
        return read_q4_1(tensor.data, (shape[0], shape[1]))
    if tensor.tensor_type == kind.Q8_0:
        return read_q8_0(tensor.data, (shape[0], shape[1]))
    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    return values.reshape(shape)


def _unpermuted(weight: Any, num_heads: int) -> Any:
    """Undo llama.cpp's order of a head's rows, which pairs neighbours for its rotary kernel."""
    num_rows = weight.shape[0]
    rows = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    order = rows.swapaxes(1, 2).reshape(-1)
    return weight.rows(order) if isinstance(weight, MatrixWeights) else weight[order]
