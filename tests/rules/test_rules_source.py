"""Rules that change while the gateway runs."""

import asyncio
import logging
import os
import threading
from pathlib import Path

import pytest

from gateway.rules.loader import RulesInvalid, load
from gateway.rules.model import RuleSet
from gateway.rules.source import RuleSource
from tests.gateway.running import eventually


def _names(rules: RuleSet) -> list[str]:
    return [rule.name for rule in rules.rules]


def _write(path: Path, name: str) -> None:
    """A new file in place of the old one, as deployments do it."""
    fresh = path.with_suffix(".new")
    fresh.write_text(f"rules: [{{name: {name}, drop: a}}]")
    os.replace(fresh, path)


async def test_changed_file_is_in_force_soon(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    _write(path, "old")
    async with RuleSource(path, check_interval_s=0.01) as source:
        assert _names(source.current()) == ["old"]

        _write(path, "new")

        await eventually(lambda: _names(source.current()) == ["new"])


async def test_invalid_file_keeps_the_old_rules_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rules.yaml"
    _write(path, "old")
    source = RuleSource(path)
    path.write_text("rules: [{dorp: a}]")

    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            await source.check()
            assert _names(source.current()) == ["old"]

    [record] = caplog.records
    assert any("did you mean 'drop'" in line for line in record.__dict__["problems"])

    _write(path, "mended")
    await source.check()
    assert _names(source.current()) == ["mended"]


async def test_file_that_vanishes_keeps_the_old_rules(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    _write(path, "old")
    source = RuleSource(path)
    path.unlink()

    await source.check()

    assert _names(source.current()) == ["old"]


async def test_reload_on_demand_needs_no_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rules.yaml"
    _write(path, "same")
    with caplog.at_level(logging.INFO):
        async with RuleSource(path, check_interval_s=1000) as source:
            source.reload_soon()

            await eventually(lambda: caplog.records)

    assert caplog.records[0].message == "rules loaded"


async def test_file_is_read_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rules.yaml"
    _write(path, "old")
    source = RuleSource(path)
    _write(path, "new")
    is_reading, may_go_on = threading.Event(), threading.Event()

    def slow(path: Path) -> RuleSet:
        is_reading.set()
        may_go_on.wait(10)
        return load(path)

    monkeypatch.setattr("gateway.rules.source.load", slow)
    checking = asyncio.create_task(source.check())

    # The loop runs, and the old rules are in force, while the file is being read.
    await eventually(is_reading.is_set)
    assert _names(source.current()) == ["old"]
    may_go_on.set()
    await checking
    assert _names(source.current()) == ["new"]


def test_start_with_an_invalid_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RulesInvalid):
        RuleSource(tmp_path / "none.yaml")


def test_no_file_means_no_rules() -> None:
    assert RuleSource(None).current() == RuleSet()
