"""Models as the tokenizer service loads them, the service, and transformers as its oracle."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh import telemetry
from tests.tokenizer_svc.served import EndedSpans, Stub, serving
from tests.tokenizer_svc.synthetic import bytes_tokenizer, write_model
from tokenizer_svc.models import TokenizerModel, load_model
from tokenizer_svc.renderer import RenderLimits

LOOPING = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


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


@pytest.fixture(scope="session")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> TokenizerModel:
    """One token per byte, no chat template."""
    folder = write_model(tmp_path_factory.mktemp("bytes"), bytes_tokenizer())
    return load_model("bytes", folder, RenderLimits())


@pytest.fixture(scope="session")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerModel]:
    """A chat template that never ends."""
    folder = tmp_path_factory.mktemp("endless")
    write_model(folder, bytes_tokenizer(), chat_template=LOOPING)
    model = load_model("endless", folder, RenderLimits(num_processes=1, timeout_s=1))
    yield model
    model.close()


@pytest.fixture
async def stub(
    smollm2: TokenizerModel, bytes_model: TokenizerModel, endless_model: TokenizerModel
) -> AsyncIterator[Stub]:
    async with serving([smollm2, bytes_model, endless_model]) as (stub, _):
        yield stub


@pytest.fixture
def spans() -> Iterator[EndedSpans]:
    ended = EndedSpans()
    telemetry.start_tracing("tokenizer", ended)
    yield ended
    telemetry.shutdown()
