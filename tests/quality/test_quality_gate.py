"""The gate as a whole: what passes, what does not, and what its verdict is bound to."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from engine.config import EngineConfig
from engine.models.registry import Choice
from quality import cli
from quality.gate import (
    Answer,
    GateResult,
    Limits,
    failures,
    limits_for,
    revision_of,
    run_gate,
)
from quality.prompts import SIX_QUESTIONS, VARIED_PROMPTS
from quality.settings import SettingsError, describe, engine_config
from quality.text_quality import TextQuality

pytestmark = pytest.mark.timeout(300)

TEXTS = {"short": "The river leaves the lake and winds through three valleys to the sea. " * 4}
GENEROUS = Limits(max_perplexity_increase=0.05, max_mean_kl=0.05, min_top1_agreement=0.8)


@pytest.fixture(scope="module")
def lossy(smollm2_path: Path) -> GateResult:
    """bfloat16 against float32."""
    return run_gate(
        "smollm2",
        engine_config(smollm2_path, ["dtype=bfloat16", "num_blocks=64"]),
        engine_config(smollm2_path, ["dtype=float32", "num_blocks=64"]),
        limits=GENEROUS,
        texts=TEXTS,
    )


def test_bfloat16_passes(lossy: GateResult) -> None:
    assert lossy.failures == ()
    assert lossy.passed
    assert len(lossy.questions) == 6
    assert lossy.quality is not None
    quality = lossy.quality["all"]
    # Another precision: close, and not the same.
    assert 0 < quality.mean_kl < 0.01
    assert quality.top1_agreement > 0.9


def test_a_verdict_is_bound_to_model_precision_and_settings(lossy: GateResult) -> None:
    said = json.loads(json.dumps(lossy.to_dict()))

    assert said["format"] == "pdmesh-gate/1"
    assert len(said["model"]["revision"]) >= 16
    assert said["candidate"]["dtype"] == "bfloat16"
    assert said["reference"]["dtype"] == "float32"
    assert said["limits"]["max_mean_kl"] == 0.05
    assert said["versions"]["torch"] == torch.__version__
    assert said["texts_sha256"]
    assert [question["right"] for question in said["questions"]] == [True] * 6


def test_engines_of_other_blocks_and_smaller_caches_are_compared(smollm2_path: Path) -> None:
    result = run_gate(
        "smollm2",
        engine_config(smollm2_path, ["dtype=bfloat16", "num_blocks=3", "block_size=16"]),
        engine_config(smollm2_path, ["dtype=float32", "num_blocks=9", "block_size=8"]),
        limits=GENEROUS,
        texts=TEXTS,
    )

    assert result.quality is not None
    # In two windows, whose last tokens predict nothing that is known.
    assert result.quality["all"].num_tokens > 48
    assert result.passed, result.failures


def test_chunking_is_lossless(smollm2_path: Path) -> None:
    result = run_gate(
        "smollm2",
        engine_config(
            smollm2_path,
            ["num_blocks=64", "max_num_batched_tokens=32", "block_size=8"],
        ),
        engine_config(smollm2_path, ["num_blocks=64"]),
        limits=None,
        prompts=VARIED_PROMPTS[1:4],
    )

    assert result.passed, result.failures
    assert result.identity is not None
    assert result.identity.num_prompts == 3
    assert result.identity.num_tokens == 3 * 48 * 2
    assert result.quality is None


def test_another_format_is_not_lossless(smollm2_path: Path) -> None:
    result = run_gate(
        "smollm2",
        engine_config(smollm2_path, ["num_blocks=64"]),
        engine_config(smollm2_path, ["dtype=bfloat16", "num_blocks=64"]),
        limits=None,
        prompts=VARIED_PROMPTS[1:4],
    )

    assert not result.passed
    assert any("differs" in failure for failure in result.failures)


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (Limits(-1.0, 1.0, 0.0), "perplexity"),
        (Limits(1.0, 0.0, 0.0), "mean KL"),
        (Limits(1.0, 1.0, 1.01), "top-1"),
    ],
)
def test_each_limit_can_fail(lossy: GateResult, limits: Limits, named: str) -> None:
    (failure,) = failures(lossy.questions, None, lossy.quality, limits)

    assert named in failure


def test_a_wrong_answer_fails_and_is_shown(lossy: GateResult) -> None:
    wrong = Answer("1 + 1 =", " 2", " 3")

    (failure,) = failures((wrong,), None, None, None)

    assert "' 3'" in failure


def test_numbers_that_are_none_fail() -> None:
    broken = TextQuality(1, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    nan = float("nan")

    found = list(
        failures(
            (),
            None,
            {"all": replace(broken, perplexity_increase=nan, mean_kl=nan, top1_agreement=nan)},
            GENEROUS,
        )
    )

    assert len(found) == 3


@pytest.mark.parametrize(
    ("choice", "increase"),
    [
        (Choice("native", "bfloat16", "bfloat16"), 0.01),
        (Choice("native", "int4", "bfloat16"), 0.01),
        (Choice("native", "int8", "bfloat16"), 0.015),
        (Choice("native", "int4", "fp8"), 0.015),
        (Choice("native", "int4_channel", "int8"), 0.015),
        (Choice("native", "int8", "int8"), 0.02),
    ],
)
def test_limits_go_by_format(choice: Choice, increase: float) -> None:
    assert limits_for(choice).max_perplexity_increase == pytest.approx(increase)


def test_settings_are_read_by_name_and_type() -> None:
    config = engine_config(
        Path("/m"), ["dtype=bfloat16", "block_size=32", "enable_prefix_caching=false"]
    )

    assert (config.dtype, config.block_size, config.enable_prefix_caching) == (
        *("bfloat16", 32, False),
    )


def test_what_auto_comes_to_is_part_of_the_verdict(smollm2_path: Path) -> None:
    described = describe(engine_config(smollm2_path, ["backend=torch"]))

    assert described["dtype"] == "auto"
    assert described["settled"] == {
        "backend": "torch",
        "weights": "float32",
        "kv_dtype": "float32",
    }
    assert "model_path" not in described


def test_a_lossless_change_needs_something_to_be_compared_with(
    smollm2_path: Path,
) -> None:
    found = CliRunner().invoke(cli.app, [str(smollm2_path), "--lossless"])

    assert found.exit_code == 2
    assert "--reference-set" in found.output


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("dtype", "NAME=VALUE"),
        ("blocksize=4", "did you mean block_size"),
        ("dtype=float12", "dtype"),
        ("block_size=many", "block_size"),
        ("segment_path=/x", "segment_path"),
    ],
)
def test_a_setting_that_does_not_exist_is_refused(assignment: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        engine_config(Path("/m"), [assignment])


def test_a_revision_changes_with_any_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = revision_of(tmp_path)

    (tmp_path / "config.json").write_text("{ }")

    assert revision_of(tmp_path) != before


def test_the_installed_models_revision_is_its_manifests(smollm2_path: Path) -> None:
    assert revision_of(smollm2_path) == revision_of(smollm2_path)


def test_there_are_six_questions_and_one_is_a_chat() -> None:
    assert [question.kind for question in SIX_QUESTIONS].count("chat") == 1
    assert len(SIX_QUESTIONS) == 6


def gate(monkeypatch: pytest.MonkeyPatch, result: GateResult, *arguments: str) -> Any:
    """The command line over a gate that was run before."""

    def run(name: str, candidate: EngineConfig, reference: EngineConfig, **_: Any) -> GateResult:
        return result

    monkeypatch.setattr(cli, "run_gate", run)
    return CliRunner().invoke(cli.app, arguments)


def test_passing_exits_with_zero_and_writes_json(
    lossy: GateResult,
    smollm2_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "gate.json"

    found = gate(monkeypatch, lossy, str(smollm2_path), "--output", str(output))

    assert found.exit_code == 0, found.output
    assert "passed" in found.output
    assert json.loads(output.read_text())["passed"] is True


def test_failing_exits_with_one_and_says_why(
    lossy: GateResult, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = replace(lossy, failures=("mean KL is 3",))

    found = gate(monkeypatch, failed, str(smollm2_path))

    assert found.exit_code == 1
    assert "mean KL is 3" in found.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("--set", "dtyp=x"), "did you mean dtype"), (("--home", "/nowhere", "unknown"), "unknown")],
)
def test_what_makes_no_sense_exits_with_two(
    arguments: tuple[str, ...], named: str, model_home: Path
) -> None:
    found = CliRunner().invoke(cli.app, ["--home", str(model_home), *arguments])

    assert found.exit_code == 2
    assert named in found.output


def test_pdmesh_gate_is_the_gate_in_a_process_of_its_own() -> None:
    mounted = (
        "import typer; from mesh.cli import gate; app = typer.Typer();"
        "app.callback()(lambda: None);"
        "app.command('gate', context_settings=gate.CONTEXT_SETTINGS)(gate.gate); app()"
    )

    found = subprocess.run(
        [sys.executable, "-c", mounted, "gate", "--set", "dtyp=x", "/"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert found.returncode == 2
    assert "did you mean dtype" in found.stderr


def test_a_verdict_that_could_not_be_written_is_not_worked_out(tmp_path: Path) -> None:
    lost = tmp_path / "nowhere" / "gate.json"

    found = CliRunner().invoke(cli.app, ["any", "--output", str(lost)])

    assert found.exit_code == 2
    assert "nowhere" in found.output
