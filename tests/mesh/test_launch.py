"""From the options of `pdmesh up` to the settings of its services."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mesh.cli.main import app
from mesh.home import Home
from mesh.launch import LaunchOptions, plan_launch


def test_rules_file_goes_to_the_gateway_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = LaunchOptions("smol", tmp_path, rules_path=Path("rules.yaml"))

    launch = plan_launch(Home(tmp_path), options, {})

    assert launch.topology["gateway"]["rules_path"] == str(tmp_path / "rules.yaml")


def test_without_a_rules_file_the_gateway_gets_none(tmp_path: Path) -> None:
    launch = plan_launch(Home(tmp_path), LaunchOptions("smol", tmp_path), {})

    assert "rules_path" not in launch.topology["gateway"]


def test_up_refuses_a_rules_file_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "rules.yaml"

    result = CliRunner().invoke(app, ["up", "--home", str(tmp_path), "--rules", str(missing)])

    assert result.exit_code == 2
    assert "--rules" in result.output
