"""The `pdmesh` command as a whole."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mesh.cli.main import COMMANDS, app


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_found_and_described(name: str) -> None:
    overview = CliRunner().invoke(app, ["--help"])

    assert overview.exit_code == 0
    assert f"│ {name} " in overview.output


def test_a_command_loads_nothing_that_only_others_need() -> None:
    code = (
        "import sys; from mesh.cli.main import app; import mesh.cli.status\n"
        "print([name for name in ('redis', 'opentelemetry.sdk', 'torch', 'numpy', 'yaml')"
        " if name in sys.modules])"
    )

    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout

    assert loaded.strip() == "[]"
