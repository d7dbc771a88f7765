"""`pdmesh rules`: check, explain, compile."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gateway.rules.cli import app
from mesh.cli import rules as mesh_rules

RULES = """
rules:
  - name: alias
    rewrite_model: {gpt-4o: smol}
  - name: fill
    when: {route: chat, header: {x-tenant: t1}}
    default: {temperature: 0.70}
  - name: few
    reject: {message: at most 4, if: {path: n, gt: 4}, param: n}
"""
BODY = b'{ "model" : "gpt-4o", "seed":9007199254740993,"x":[ ] }\n'


@pytest.fixture
def rules_file(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


@pytest.fixture
def body_file(tmp_path: Path) -> Path:
    path = tmp_path / "body.json"
    path.write_bytes(BODY)
    return path


def test_check_counts_the_rules(rules_file: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(rules_file)])

    assert (result.exit_code, result.stdout) == (0, f"{rules_file}: 3 rules, no problems\n")


def test_check_tells_every_problem_and_fails(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("rules:\n  - dorp: a\n  - force: {n: 0x1}\n")

    result = CliRunner().invoke(app, ["check", str(path)])

    assert result.exit_code == 1
    assert f"{path}:2: " in result.stderr
    assert f"{path}:3: " in result.stderr


def test_explain_prints_the_forwarded_text_exactly(rules_file: Path, body_file: Path) -> None:
    options = ["explain", str(rules_file), "--body", str(body_file), "--header", "X-Tenant: t1"]

    as_text = CliRunner().invoke(app, options)
    as_json = CliRunner().invoke(app, [*options, "--json"])

    expected = '{ "model" : "smol", "seed":9007199254740993,"x":[ ],"temperature":0.70 }\n'
    told = json.loads(as_json.stdout)
    assert as_text.stdout == expected
    assert told["body"] == expected
    assert told["actions"] == [
        {"kind": "rewrite_model", "path": "smol", "rule": "alias"},
        {"kind": "default", "path": "temperature", "rule": "fill"},
    ]
    assert told["param_actions"] == "rewrite_model:smol, default:temperature"
    assert told["rejected"] is None


def test_explain_takes_another_model_and_route(rules_file: Path, body_file: Path) -> None:
    options = ["explain", str(rules_file), "--body", str(body_file), "--json"]
    options += ["--model", "other", "--route", "completions", "--header", "x-tenant: t1"]

    told = json.loads(CliRunner().invoke(app, options).stdout)

    assert told["actions"] == []
    assert told["body"] == BODY.decode().replace("gpt-4o", "other")


def test_explain_shows_a_refusal(rules_file: Path) -> None:
    options = ["explain", str(rules_file), "--body", "-", "--json"]

    told = json.loads(CliRunner().invoke(app, options, input=b'{"n":5}').stdout)

    assert told["body"] is None
    assert told["rejected"] == {"status": 400, "message": "at most 4", "code": None, "param": "n"}


def test_explain_says_where_a_body_is_broken(rules_file: Path) -> None:
    options = ["explain", str(rules_file), "--body", "-"]

    result = CliRunner().invoke(app, options, input=b'{"n":NaN}')

    assert result.exit_code == 1
    assert "NaN and Infinity are not JSON numbers at byte offset 5" in result.stderr


def test_compile_writes_lua_and_warns_of_keys(tmp_path: Path) -> None:
    path, output = tmp_path / "rules.yaml", tmp_path / "rules.lua"
    path.write_text("rules: [{name: team, when: {key_group: a}, drop: b}]")

    result = CliRunner().invoke(app, ["compile", str(path), "-o", str(output)])

    assert result.exit_code == 0
    assert "rule 'team' looks at API keys" in result.stderr
    assert output.read_text().startswith("-- Made by `pdmesh rules compile` from rules.yaml.")


def test_pdmesh_passes_everything_on(rules_file: Path) -> None:
    pdmesh = typer.Typer()
    pdmesh.command("rules", context_settings=mesh_rules.CONTEXT_SETTINGS)(mesh_rules.rules)
    pdmesh.command("other")(lambda: None)

    checked = CliRunner().invoke(pdmesh, ["rules", "check", str(rules_file)])
    helped = CliRunner().invoke(pdmesh, ["rules", "explain", "--help"])

    assert (checked.exit_code, checked.stdout) == (0, f"{rules_file}: 3 rules, no problems\n")
    assert "--body" in helped.stdout
