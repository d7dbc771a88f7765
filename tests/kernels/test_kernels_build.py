"""Building the library, and doing without a compiler."""

import fcntl
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.kernels import build


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """No answer of another test is remembered, nor this one's by others."""
    build.ensure_library.cache_clear()
    yield
    build.ensure_library.cache_clear()


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources without a library, and an empty home."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "a.cpp").write_text("int a;")
    monkeypatch.setattr(build, "SOURCE_FOLDER", sources)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    return sources


def test_without_a_compiler_there_is_one_warning_and_no_library(
    away: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))

    with caplog.at_level(logging.WARNING):
        assert build.ensure_library() is None
        assert build.ensure_library() is None

    assert [record.message for record in caplog.records] == [
        "kernels are not available, torch serves instead"
    ]
    assert "no-such-compiler" in str(vars(caplog.records[0])["why"])


def test_a_compiler_that_fails_gives_its_own_words(tmp_path: Path) -> None:
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler")

    with pytest.raises(build.BuildError, match="no-such-flag"):
        build.build(tmp_path / "lib.so", ["-fno-such-flag"])

    assert list(tmp_path.iterdir()) == []


def test_what_was_built_once_is_taken_from_the_cache(
    away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []

    def fake_build(target: Path, extra_flags: Sequence[str]) -> Path:
        target.write_bytes(b"")
        built.append(target)
        return target

    monkeypatch.setattr(build, "build", fake_build)
    first = build.ensure_library()
    build.ensure_library.cache_clear()

    assert build.ensure_library() == first
    assert built == [first]


def test_what_another_process_compiles_is_waited_for(
    away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Path.home() / ".cache" / "pdmesh" / build.library_name()

    def wait_for_it(file: object, operation: int) -> None:
        assert operation == fcntl.LOCK_EX
        target.write_bytes(b"")

    monkeypatch.setattr(fcntl, "flock", wait_for_it)
    # Whoever compiles fails here.
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))

    assert build.ensure_library() == target


def test_without_a_home_there_is_no_library(away: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A container's user that /etc/passwd does not know, without HOME.
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", refuse)

    assert build.ensure_library() is None


def test_a_library_of_other_sources_is_not_used(
    away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "build", lambda target, extra_flags: target)
    beside = away / build.library_name()
    beside.write_bytes(b"")
    assert build.ensure_library() == beside
    build.ensure_library.cache_clear()

    (away / "a.cpp").write_text("int b;")

    chosen = build.ensure_library()
    assert chosen is not None
    assert chosen.parent != away


def test_building_in_place_removes_what_older_sources_gave(
    away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = away / build.library_name()
    old.write_bytes(b"")
    (away / "a.cpp").write_text("int b;")
    monkeypatch.setattr(build, "build", lambda target: target)

    target = build.build_in_place()

    assert not old.exists()
    assert target.name == build.library_name()
