"""/v1/models: what is served."""

from collections.abc import Sequence

from gateway.openai.responses import Model, ModelList
from mesh.v1 import tokenizer_pb2


def model_object(model: tokenizer_pb2.ModelInfo) -> Model:
    """OpenAI's model object, with vLLM's window."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_at_s,
        "owned_by": "pdmesh",
        "max_model_len": model.max_model_len,
    }


def model_list(models: Sequence[tokenizer_pb2.ModelInfo]) -> ModelList:
    return {"object": "list", "data": [model_object(model) for model in models]}
