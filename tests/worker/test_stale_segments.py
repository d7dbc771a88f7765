"""A killed worker's shared memory is freed by its successor, and a living one's by nobody."""

import fcntl
from pathlib import Path

from mesh.registry import new_incarnation
from worker.stale_segments import remove_stale_segments


def test_only_segments_of_dead_processes_with_this_worker_id_are_removed(tmp_path: Path) -> None:
    dead, held = (tmp_path / f"mesh-decode-1-{new_incarnation()}" for _ in range(2))
    others = [
        tmp_path / f"mesh-decode-11-{new_incarnation()}",
        tmp_path / f"mesh-decode-1-again-{new_incarnation()}",
        tmp_path / "mesh-decode-1-notes",
    ]
    for path in (dead, held, *others):
        path.write_bytes(b"kv")

    with held.open("rb") as engine:
        fcntl.flock(engine, fcntl.LOCK_EX)
        remove_stale_segments(tmp_path, "mesh-decode-1-")

    assert sorted(tmp_path.iterdir()) == sorted([held, *others])


def test_a_folder_without_segments_is_fine(tmp_path: Path) -> None:
    remove_stale_segments(tmp_path, "mesh-decode-1-")


def test_what_cannot_be_opened_is_left_and_keeps_no_worker_from_starting(tmp_path: Path) -> None:
    dead = tmp_path / f"mesh-decode-1-{new_incarnation()}"
    dead.write_bytes(b"kv")
    # As another user's file is for all users but root.
    closed = tmp_path / f"mesh-decode-1-{new_incarnation()}"
    closed.mkdir()

    remove_stale_segments(tmp_path, "mesh-decode-1-")

    assert list(tmp_path.iterdir()) == [closed]
