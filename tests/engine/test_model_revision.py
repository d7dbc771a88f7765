"""Weights that differ never share blocks; where they lie does not matter."""

from pathlib import Path

from engine.model_revision import model_revision


def write_model(folder: Path, weights: bytes = b"w" * 300_000, config: bytes = b"{}") -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_equal_files_have_equal_revisions_wherever_they_are(tmp_path: Path) -> None:
    first = write_model(tmp_path / "a")
    second = write_model(tmp_path / "b")
    (second / "README.md").write_text("not part of the model")

    assert model_revision(first) == model_revision(second)


def test_other_weights_size_or_config_is_another_revision(tmp_path: Path) -> None:
    models = [
        write_model(tmp_path / "plain"),
        write_model(tmp_path / "trained", bytes(range(256)) * 1172),
        write_model(tmp_path / "longer", b"w" * 300_001),
        write_model(tmp_path / "configured", config=b'{"rope_theta": 1}'),
    ]

    assert len({model_revision(model) for model in models}) == len(models)
