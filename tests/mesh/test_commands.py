"""The `pdmesh` command as a whole."""

import subprocess
import sys

import pytest
from rich.table import Table
from typer.testing import CliRunner

from mesh.cli.main import COMMANDS, app
from mesh.cli.options import output_console


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


@pytest.mark.parametrize(("columns", "is_cut"), [(None, False), ("80", True)])
def test_a_table_is_cut_only_where_somebody_said_how_wide_lines_may_be(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: str | None,
    is_cut: bool,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    table = Table("model", "address", box=None)
    table.add_row("m" * 90, "127.0.0.1:26800")

    output_console().print(table)

    assert ("m" * 90 not in capsys.readouterr().out) == is_cut
