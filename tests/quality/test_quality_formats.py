"""The gate over all formats: which are judged, against what, and what it says of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.config import EngineConfig
from quality import cli, formats
from quality.gate import GateResult, Limits
from quality.text_quality import TextQuality


def fake_gate(perplexities: dict[str, float]) -> Any:
    """A gate whose candidates have these perplexities, by their KV format."""

    def run_gate(
        name: str, candidate: EngineConfig, reference: EngineConfig, *, limits: Limits
    ) -> GateResult:
        assert (reference.backend, reference.dtype) == ("torch", "float32")
        perplexity = perplexities[candidate.kv_cache_dtype]
        quality = TextQuality(
            num_tokens=100,
            reference_perplexity=10.0,
            candidate_perplexity=perplexity,
            perplexity_increase=perplexity / 10 - 1,
            mean_kl=0.001,
            max_kl=0.1,
            top1_agreement=0.97,
        )
        return GateResult(
            model=name,
            revision="r",
            candidate={},
            reference={},
            questions=(),
            identity=None,
            quality={"all": quality},
            limits=limits,
            texts_sha256="",
            failures=(),
        )

    return run_gate


def judge(monkeypatch: pytest.MonkeyPatch, folder: Path, perplexities: dict[str, float]) -> Any:
    monkeypatch.setattr(formats, "run_gate", fake_gate(perplexities))
    return CliRunner().invoke(cli.app, [str(folder), "--formats", "all", "--json"])


def test_every_pair_of_formats_is_judged(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = judge(monkeypatch, smollm2_path, {"bfloat16": 10.0, "int8": 10.04, "fp8": 10.04})

    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["format"] == "pdmesh-gate-formats/1"
    pairs = [(each["weights"], each["kv_dtype"]) for each in report["results"]]
    assert pairs == [(w, kv) for w in formats.WEIGHTS for kv in ("bfloat16", "int8", "fp8")]
    int8_kv = report["results"][1]
    assert int8_kv["kv_perplexity_increase"] == pytest.approx(0.004)
    assert int8_kv["gate"]["limits"]["max_perplexity_increase"] == pytest.approx(0.015)


def test_keys_and_values_may_cost_half_a_percent_whatever_the_weights_leave(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = judge(monkeypatch, smollm2_path, {"bfloat16": 9.9, "int8": 9.94, "fp8": 9.96})

    assert found.exit_code == 1
    failed = [each for each in json.loads(found.stdout)["results"] if not each["passed"]]
    assert {each["kv_dtype"] for each in failed} == {"fp8"}
    assert failed[0]["failures"] == ["fp8 KV alone costs 0.61%"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all", "--lossless"], "--lossless does not"),
        (["int4,int3"], "'int3' is none of int4, int4_channel, int8"),
    ],
)
def test_what_makes_no_sense_is_refused(
    smollm2_path: Path, arguments: list[str], message: str
) -> None:
    found = CliRunner().invoke(cli.app, [str(smollm2_path), "--formats", *arguments])

    assert found.exit_code == 2
    assert message in found.output
