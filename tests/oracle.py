"""What `transformers` says of a sequence of tokens."""

from collections.abc import Sequence
from pathlib import Path

import torch


class Oracle:
    """The default model in float32, as `transformers` computes it."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def log_probabilities(
        self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> torch.Tensor:
        """Of every token, after the prompt and after each output token but the last.

        Float32 `[len(output_token_ids), vocab_size]`. If the argmax of each row is the
        output token, then, by induction, a greedy loop produces these outputs.
        """
        sequence = torch.tensor([[*prompt_token_ids, *output_token_ids[:-1]]])
        with torch.inference_mode():
            logits = self._model(sequence, logits_to_keep=len(output_token_ids)).logits[0]
        return torch.log_softmax(logits, -1)
