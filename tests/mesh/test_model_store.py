"""Installing and finding models."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from mesh import model_store, smollm2
from mesh.cli.model import app
from mesh.model_store import ModelStoreError
from tests.tiny_llama import make_tiny_model

EMBEDDING = "model.embed_tokens.weight"


def make_folder(path: Path, *, vocab: int = 8) -> Path:
    """A Hugging Face folder that is complete as far as the store looks."""
    path.mkdir(parents=True)
    write_json(path / "config.json", {"architectures": ["LlamaForCausalLM"]})
    write_json(path / "tokenizer.json", {"model": {"vocab": {"a": 0, "b": vocab - 1}}})
    write_weights(path / "model.safetensors", EMBEDDING)
    return path


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def write_weights(path: Path, *names: str) -> None:
    save_file({name: np.ones((8, 2), np.float32) for name in names}, path)


def ignore(_: str) -> None:
    """A report that goes nowhere."""


def test_a_folder_is_installed_under_its_name_and_found(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "my-llama")

    folder = model_store.add(tmp_path / "home", str(source), report=ignore)

    assert folder == tmp_path / "home" / "models" / "my-llama"
    assert model_store.resolve(tmp_path / "home", "my-llama") == folder
    assert (folder / "config.json").read_bytes() == (source / "config.json").read_bytes()
    [manifest] = model_store.list_models(tmp_path / "home")
    assert manifest.name == "my-llama"
    assert manifest.source == {"path": str(source)}
    assert manifest.files.keys() == {"config.json", "tokenizer.json", "model.safetensors"}
    assert model_store.damaged_files(folder) == []


def test_weights_are_linked_and_not_copied(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "m")

    folder = model_store.add(tmp_path / "home", str(source), report=ignore)

    assert (folder / "model.safetensors").samefile(source / "model.safetensors")


def test_only_what_serving_needs_is_installed(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "m")
    for name in ("pytorch_model.bin", "modeling.py", "README.md", "other.safetensors"):
        (source / name).write_text("x")
    (source / "chat_template.jinja").write_text("{{ messages }}")

    folder = model_store.add(tmp_path / "home", str(source), report=ignore)

    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "chat_template.jinja",
        model_store.MANIFEST,
    }


def test_adding_again_replaces_what_was_there(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "m")
    before = model_store.add(tmp_path / "home", str(source), report=ignore)
    old = model_store.list_models(tmp_path / "home")[0]
    (source / "config.json").unlink()
    write_json(source / "config.json", {"architectures": ["MistralForCausalLM"]})

    after = model_store.add(tmp_path / "home", str(source), report=ignore)

    [new] = model_store.list_models(tmp_path / "home")
    assert after == before
    assert json.loads((after / "config.json").read_text())["architectures"] == [
        "MistralForCausalLM"
    ]
    assert new.revision != old.revision
    assert [path.name for path in after.parent.iterdir() if path.is_dir()] == ["m"]


def test_an_installed_folder_can_be_added_under_another_name(tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = model_store.add(home, str(make_folder(tmp_path / "m")), report=ignore)

    model_store.add(home, str(first), "org/other", report=ignore)

    by_name = {manifest.name: manifest for manifest in model_store.list_models(home)}
    assert by_name.keys() == {"m", "org/other"}
    assert by_name["m"].revision == by_name["org/other"].revision
    assert model_store.resolve(home, "org/other").name == "org--other"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("config.json", None, r"config.json: missing"),
        ("config.json", [1], "expected a JSON object"),
        ("config.json", {"architectures": ["BertModel"]}, "BertModel.*not supported"),
        ("config.json", {}, "not supported"),
        # ML-06
        (
            "config.json",
            {"architectures": ["LlamaForCausalLM"], "auto_map": {"AutoModel": "x.X"}},
            "auto_map",
        ),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": "x.X"}}, "auto_map"),
        ("tokenizer.json", None, r"tokenizer.json: missing"),
        ("tokenizer.json", {"model": {}}, "no usable vocabulary"),
        ("tokenizer.json", {"model": {"vocab": {"a": 8}}}, "token id 8 is beyond .* 8 embeddings"),
        ("model.safetensors", None, "neither model.safetensors nor"),
        ("model.safetensors", "not safetensors", "not a complete safetensors file"),
        # ML-01
        (
            "model.safetensors.index.json",
            {"weight_map": {EMBEDDING: "missing.safetensors"}},
            r"missing.safetensors: missing, but",
        ),
        (
            "model.safetensors.index.json",
            {"weight_map": {EMBEDDING: "../m/model.safetensors"}},
            "not a file of the folder",
        ),
        (
            "model.safetensors.index.json",
            {"weight_map": {EMBEDDING: "model.safetensors", "b": "model.safetensors"}},
            r"model.safetensors: lacks b",
        ),
        ("model.safetensors.index.json", {}, "weight_map is missing or empty"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused_and_leaves_nothing(
    name: str, value: Any, message: str, tmp_path: Path
) -> None:
    source = make_folder(tmp_path / "m")
    if value is None:
        (source / name).unlink()
    else:
        write_json(source / name, value)

    with pytest.raises(ModelStoreError, match=message) as caught:
        model_store.add(tmp_path / "home", str(source), report=ignore)

    assert str(source) in str(caught.value)
    assert [p for p in (tmp_path / "home" / "models").iterdir() if p.is_dir()] == []


# ML-06
def test_a_folder_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "m")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")

    with pytest.raises(ModelStoreError, match=r"pytorch_model.bin would have to be unpickled"):
        model_store.add(tmp_path / "home", str(source), report=ignore)


def test_shards_are_installed_together(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "m")
    write_weights(source / "b.safetensors", "other")
    write_json(
        source / "model.safetensors.index.json",
        {"weight_map": {EMBEDDING: "model.safetensors", "other": "b.safetensors"}},
    )

    folder = model_store.add(tmp_path / "home", str(source), report=ignore)

    assert (folder / "b.safetensors").exists()
    assert (folder / "model.safetensors.index.json").exists()


def test_a_hub_repository_is_fetched_without_pickles_or_code(tmp_path: Path) -> None:
    # As the hub's cache has it: files that are links into a blob store.
    blobs = make_folder(tmp_path / "blobs")
    snapshot = tmp_path / "0123abcd"
    snapshot.mkdir()
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(blob)
    asked: dict[str, Any] = {}

    def download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(snapshot)

    folder = model_store.add_from_hub(tmp_path / "home", "org/m", None, ignore, download)

    assert asked["repo_id"] == "org/m"
    assert set(asked["allow_patterns"]) == {"*.safetensors", "*.json", "*.jinja"}
    assert not (folder / "model.safetensors").is_symlink()
    assert model_store.resolve(tmp_path / "home", "org/m") == folder
    assert model_store.list_models(tmp_path / "home")[0].source == {
        "repo_id": "org/m",
        "commit": "0123abcd",
    }


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b/c", "/etc", "a b", ".hidden", "a\n"])
def test_names_that_are_no_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelStoreError, match="is not a model name"):
        model_store.resolve(tmp_path, name)


def test_an_unknown_model_is_refused_with_what_is_installed(tmp_path: Path) -> None:
    model_store.add(tmp_path, str(make_folder(tmp_path / "m")), report=ignore)

    with pytest.raises(ModelStoreError, match=r"'n' is not installed in .* \(installed: m\)"):
        model_store.resolve(tmp_path, "n")


def test_a_spec_of_no_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelStoreError, match="neither smollm2-135m-instruct, nor a folder"):
        model_store.add(tmp_path, "no-such-thing", report=ignore)


def test_many_who_want_the_default_model_install_it_once(tmp_path: Path) -> None:
    installs: list[Path] = []
    everyone = threading.Barrier(4)

    def install(folder: Path) -> dict[str, str]:
        installs.append(folder)
        write_json(folder / "config.json", {})
        return {"from": "a test"}

    def ensure(_: int) -> Path:
        everyone.wait(timeout=10)
        return model_store.ensure(tmp_path, smollm2.NAME, ignore, install)

    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(ensure, range(4)))

    assert folders == {tmp_path / "models" / smollm2.NAME}
    assert len(installs) == 1


def test_what_a_killed_installation_left_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / "models" / f".{smollm2.NAME}.staging-x1"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_text("half of it")

    model_store.ensure(tmp_path, smollm2.NAME, ignore, lambda folder: {"from": "a test"})

    assert not leftover.exists()


def test_an_installation_with_a_file_missing_is_made_again(tmp_path: Path) -> None:
    def install(folder: Path) -> dict[str, str]:
        write_json(folder / "config.json", {"a": 1})
        return {}

    folder = model_store.ensure(tmp_path, smollm2.NAME, ignore, install)
    (folder / "config.json").unlink()

    model_store.ensure(tmp_path, smollm2.NAME, ignore, install)

    assert (folder / "config.json").exists()


def test_a_file_that_changed_is_reported_as_damaged(tmp_path: Path) -> None:
    folder = model_store.add(tmp_path, str(make_folder(tmp_path / "m")), report=ignore)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)

    assert model_store.damaged_files(folder) == ["model.safetensors"]


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 1, "files": {"a": 1}}'])
def test_a_damaged_manifest_is_in_the_way_of_no_other_model(tmp_path: Path, text: str) -> None:
    whole = model_store.add(tmp_path, str(make_folder(tmp_path / "whole")), report=ignore)
    damaged = model_store.add(tmp_path, str(make_folder(tmp_path / "damaged")), report=ignore)
    (damaged / model_store.MANIFEST).write_text(text)

    assert [one.name for one in model_store.list_models(tmp_path)] == ["whole"]
    assert model_store.resolve(tmp_path, "whole") == whole
    with pytest.raises(model_store.ModelStoreError, match="not installed"):
        model_store.resolve(tmp_path, "damaged")
    model_store.add(tmp_path, str(tmp_path / "damaged"), report=ignore)
    assert model_store.damaged_files(damaged) == []


def test_adding_the_default_model_again_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installs: list[Path] = []

    def install(folder: Path) -> dict[str, str]:
        installs.append(folder)
        write_json(folder / "config.json", {"a": 1})
        return {}

    monkeypatch.setattr(smollm2, "install", install)
    folder = model_store.add(tmp_path, smollm2.NAME, report=ignore)
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("1", "2"))

    # Whoever only serves it does not read all of its files for that.
    model_store.ensure(tmp_path, smollm2.NAME)
    assert len(installs) == 1
    for _ in range(2):
        model_store.add(tmp_path, smollm2.NAME, report=ignore)
    assert len(installs) == 2
    assert model_store.damaged_files(folder) == []


def test_the_command_adds_and_lists(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "m")
    runner = CliRunner(env={"PDMESH_HOME": str(tmp_path / "home")})

    added = runner.invoke(app, ["add", str(source), "--name", "mine"])
    listed = runner.invoke(app, ["list", "--json"])
    table = runner.invoke(app, ["list"])

    assert added.exit_code == 0
    assert added.stdout.strip() == str(tmp_path / "home" / "models" / "mine")
    [model] = json.loads(listed.stdout)["models"]
    assert model["name"] == "mine"
    assert "mine" in table.stdout


def test_the_command_explains_what_it_refuses(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["add", "nothing", "--home", str(tmp_path)])

    assert result.exit_code == 1
    assert result.stdout == ""
    assert "nothing: neither smollm2-135m-instruct" in result.stderr


def test_the_command_quantizes_and_installs(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "tiny")
    write_json(tmp_path / "tiny" / "tokenizer.json", {"model": {"vocab": {"a": 0}}})
    runner = CliRunner(env={"PDMESH_HOME": str(tmp_path / "home")})
    runner.invoke(app, ["add", str(tmp_path / "tiny")])

    installed = runner.invoke(app, ["quantize", "tiny", "--quantization", "int4"])
    written = runner.invoke(
        app, ["quantize", "tiny", "--quantization", "int8", "--output", str(tmp_path / "out")]
    )
    again = runner.invoke(app, ["quantize", "tiny-int4", "--quantization", "int8"])
    taken = runner.invoke(
        app, ["quantize", "tiny", "--quantization", "int8", "--output", str(tmp_path / "out")]
    )

    assert installed.exit_code == written.exit_code == 0, installed.output + written.output
    [manifest] = [m for m in model_store.list_models(tmp_path / "home") if m.name == "tiny-int4"]
    assert manifest.source == {"model": "tiny", "quantization": "int4"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert not (tmp_path / "out" / model_store.MANIFEST).exists()
    assert again.exit_code == taken.exit_code == 1
    assert "is quantized to int4 already" in again.output.replace("\n", " ")
    assert "File exists" in taken.output.replace("\n", " ")
    assert len(model_store.list_models(tmp_path / "home")) == 2
