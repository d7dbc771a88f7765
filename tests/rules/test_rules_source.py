"""Rules that change while the gateway runs."""

import logging
import os
from pathlib import Path

import pytest

from gateway.rules.loader import RulesInvalid
from gateway.rules.model import RuleSet
from gateway.rules.source import RuleSource


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _names(rules: RuleSet) -> list[str]:
    return [rule.name for rule in rules.rules]


def _write(path: Path, name: str) -> None:
    """A new file in place of the old one, as deployments do it."""
    fresh = path.with_suffix(".new")
    fresh.write_text(f"rules: [{{name: {name}, drop: a}}]")
    os.replace(fresh, path)


def test_changed_file_is_in_force_after_the_interval(tmp_path: Path) -> None:
    path, clock = tmp_path / "rules.yaml", _Clock()
    _write(path, "old")
    source = RuleSource(path, check_interval_s=1.0, clock=clock)
    _write(path, "new")

    clock.now = 0.9
    assert _names(source.current()) == ["old"]
    clock.now = 1.0
    assert _names(source.current()) == ["new"]


def test_invalid_file_keeps_the_old_rules_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "rules.yaml", _Clock()
    _write(path, "old")
    source = RuleSource(path, check_interval_s=1.0, clock=clock)
    path.write_text("rules: [{dorp: a}]")

    with caplog.at_level(logging.ERROR):
        for clock.now in (1.0, 2.0, 3.0):
            assert _names(source.current()) == ["old"]

    [record] = caplog.records
    assert any("did you mean 'drop'" in line for line in record.__dict__["problems"])

    _write(path, "mended")
    clock.now = 4.0
    assert _names(source.current()) == ["mended"]


def test_file_that_vanishes_keeps_the_old_rules(tmp_path: Path) -> None:
    path, clock = tmp_path / "rules.yaml", _Clock()
    _write(path, "old")
    source = RuleSource(path, check_interval_s=1.0, clock=clock)
    path.unlink()

    clock.now = 1.0
    assert _names(source.current()) == ["old"]


def test_reload_on_demand_needs_no_change(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    _write(path, "old")
    source = RuleSource(path, check_interval_s=1000)
    _write(path, "new")

    assert source.reload()
    assert _names(source.current()) == ["new"]


def test_start_with_an_invalid_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RulesInvalid):
        RuleSource(tmp_path / "none.yaml")


def test_no_file_means_no_rules() -> None:
    assert RuleSource(None).current() == RuleSet()
