"""The default model as the tokenizer service loads it, and transformers as its oracle."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenizer_svc.models import TokenizerModel, load_model
from tokenizer_svc.renderer import RenderLimits


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[TokenizerModel]:
    model = load_model("smollm2", smollm2_path, RenderLimits(num_processes=1))
    yield model
    model.close()


@pytest.fixture
def load() -> Iterator[Callable[[Path], TokenizerModel]]:
    """Loads a folder; the model is closed with the test."""
    models: list[TokenizerModel] = []

    def load(folder: Path) -> TokenizerModel:
        models.append(load_model(folder.name, folder, RenderLimits(num_processes=1)))
        return models[-1]

    yield load
    for model in models:
        model.close()


@pytest.fixture(scope="session")
def make_oracle() -> Callable[[Path], Any]:
    from transformers import PreTrainedTokenizerFast

    def make(folder: Path) -> Any:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        special = {k: v for k, v in config.items() if k.endswith("_token") and isinstance(v, str)}
        return PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            chat_template=config.get("chat_template"),
            **special,
        )

    return make


@pytest.fixture(scope="session")
def oracle(make_oracle: Callable[[Path], Any], smollm2_path: Path) -> Any:
    return make_oracle(smollm2_path)
