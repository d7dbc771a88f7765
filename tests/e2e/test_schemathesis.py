"""schemathesis against a mesh of real processes, with a model that is quick because it is small."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import RunningMesh, pdmesh, start_mesh
from tests.schemathesis_run import attack, rules_that_name
from tests.tiny_llama import make_tiny_model

MODEL = "tiny"


@pytest.fixture
def tiny_mesh(
    tmp_path_factory: pytest.TempPathFactory, model_home: Path, smollm2_path: Path
) -> Iterator[RunningMesh]:
    home = tmp_path_factory.mktemp("tiny-mesh")
    model = home / MODEL
    # A random model that reads and writes SmolLM2's tokens.
    make_tiny_model(model, vocab_size=49152, max_position_embeddings=512)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_path / name, model / name)
    rules = home / "rules.yaml"
    rules.write_text(rules_that_name(MODEL))
    running = start_mesh(
        home,
        model_home,
        *("--model", str(model)),
        *("--set", f"gateway.rules_path={rules}"),
        *("--set", "decode.num_threads=1", "--set", "prefill.num_threads=1"),
    )
    yield running
    pdmesh(home, "down")


async def test_a_real_mesh_fails_no_request_and_answers_as_described(
    tiny_mesh: RunningMesh, tmp_path: Path
) -> None:
    await attack(tiny_mesh.url, tmp_path, max_examples=25)

    services = tiny_mesh.status()["services"]
    assert all(one["restarts"] == 0 for one in services), services
