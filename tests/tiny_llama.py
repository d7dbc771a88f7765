"""A random two-layer model of the Llama family, made by transformers, and its reference logits."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large enough for clear differences between tokens.
    "initializer_range": 0.3,
}


def make_tiny_model(folder: Path, *, mistral: bool = False, seed: int = 0, **config: Any) -> Any:
    """Save a random model into `folder` and return it."""
    torch.manual_seed(seed)
    values = {**TINY, **config}
    model: Any = (
        MistralForCausalLM(MistralConfig(**values))
        if mistral
        else LlamaForCausalLM(LlamaConfig(**values))
    )
    for name, parameter in model.named_parameters():
        # transformers starts biases at zero and norms at one, which would hide a mix-up.
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.eval().save_pretrained(folder)
    return model


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    """Return float32 logits of every position, computed by transformers in one pass."""
    logits: Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits
