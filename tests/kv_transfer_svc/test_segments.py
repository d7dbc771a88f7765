"""Segments: checked when attached, mapped while used, gone afterwards."""

import os
import resource
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kv_transfer_svc.segments import Segment, SegmentSpec, SegmentTable
from mesh.errors import InvalidRequest, KvTransferFailed


def make_spec(folder: Path, engine_id: str = "e1", num_blocks: int = 8) -> SegmentSpec:
    """A segment file whose block n is filled with the byte n."""
    spec = SegmentSpec(engine_id, str(folder / engine_id), 4096, num_blocks, "f1")
    blocks = np.repeat(np.arange(num_blocks, dtype=np.uint8), spec.block_bytes)
    Path(spec.path).write_bytes(blocks.tobytes())
    return spec


def is_mapped(path: str) -> bool:
    return path in Path("/proc/self/maps").read_text()


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_attached_segment_shows_the_engines_memory(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    table = SegmentTable()

    with table.attached(spec) as segment:
        assert segment.blocks.shape == (8, 4096)
        assert (segment.blocks[5] == 5).all()
        segment.blocks[0] = 9

    assert Path(spec.path).read_bytes()[:4096] == bytes([9]) * 4096


def test_detached_segment_is_unmapped_and_closed(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    table = SegmentTable()
    before = num_open_files()

    with table.attached(spec):
        assert len(table) == 1
        assert is_mapped(spec.path)

    assert len(table) == 0
    assert not is_mapped(spec.path)
    assert num_open_files() == before


def test_segment_in_use_stays_mapped_until_the_last_user_leaves(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    table = SegmentTable()
    with ExitStack() as first_user, ExitStack() as second_user:
        with table.attached(spec):
            (segment,) = first_user.enter_context(table.in_use("e1"))
            second_user.enter_context(table.in_use("e1"))

        assert len(table) == 0
        assert (segment.blocks[3] == 3).all()
        first_user.close()
        assert segment.is_mapped

    assert not segment.is_mapped
    assert not is_mapped(spec.path)


def test_detached_segment_takes_no_new_users(tmp_path: Path) -> None:
    table = SegmentTable()
    with table.attached(make_spec(tmp_path)):
        pass

    with pytest.raises(KvTransferFailed, match="'e1' is not attached"), table.in_use("e1"):
        pass


def test_missing_partner_leaves_no_user_behind(tmp_path: Path) -> None:
    table = SegmentTable()
    with (
        table.attached(make_spec(tmp_path)) as segment,
        pytest.raises(KvTransferFailed, match="'e2'"),
        table.in_use("e1", "e2"),
    ):
        pass

    assert not segment.is_mapped


def test_second_attachment_replaces_the_first_and_survives_its_end(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    table = SegmentTable()
    first = ExitStack()
    first.enter_context(table.attached(spec))

    with table.attached(spec) as second:
        first.close()

        with table.in_use("e1") as (segment,):
            assert segment is second


def test_missing_file_is_refused(tmp_path: Path) -> None:
    spec = SegmentSpec("e1", str(tmp_path / "nothing"), 4096, 8, "f1")

    with pytest.raises(InvalidRequest, match="nothing"):
        Segment(spec)


@pytest.mark.parametrize("num_bytes", [0, 8 * 4096 - 1])
def test_file_smaller_than_announced_is_refused(tmp_path: Path, num_bytes: int) -> None:
    # KV-20
    spec = make_spec(tmp_path)
    os.truncate(spec.path, num_bytes)
    before = num_open_files()

    with pytest.raises(InvalidRequest, match=f"{num_bytes} bytes, fewer than 8 blocks of 4096"):
        Segment(spec)

    assert num_open_files() == before


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_what_is_not_a_file_is_refused(tmp_path: Path, kind: str) -> None:
    spec = replace(make_spec(tmp_path), path=str(tmp_path / kind))
    if kind == "folder":
        os.mkdir(spec.path)
    elif kind == "link":
        os.symlink(tmp_path / "e1", spec.path)
    else:
        os.mkfifo(spec.path)

    with pytest.raises(InvalidRequest):
        Segment(spec)


@pytest.mark.parametrize("changes", [{"block_bytes": 0}, {"num_blocks": 0}, {"path": "a\0b"}])
def test_nonsense_is_refused(tmp_path: Path, changes: dict[str, int | str]) -> None:
    with pytest.raises(InvalidRequest):
        Segment(replace(make_spec(tmp_path), **changes))  # type: ignore[arg-type]


def test_file_cut_short_after_attaching_is_noticed_before_it_is_read(tmp_path: Path) -> None:
    # KV-20
    spec = make_spec(tmp_path)
    with SegmentTable().attached(spec) as segment:
        segment.check_size()
        os.truncate(spec.path, 4096)

        with pytest.raises(KvTransferFailed, match="truncated"):
            segment.check_size()


def test_pages_of_a_run_are_mapped_before_the_first_copy(tmp_path: Path) -> None:
    spec = SegmentSpec("e1", f"/dev/shm/pdmesh-test-{os.getpid()}", 40960, 64, "f1")
    Path(spec.path).write_bytes(bytes(spec.num_bytes))
    try:
        with SegmentTable().attached(spec) as segment:
            segment.make_resident(3, 20)

            assert _resident_bytes(spec.path) >= 20 * 40960
            assert _resident_bytes(spec.path) < 30 * 40960
            num_faults = _num_page_faults()
            segment.blocks[3:23] = 1
            assert _num_page_faults() - num_faults < 20
    finally:
        os.unlink(spec.path)


def _num_page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def _resident_bytes(path: str) -> int:
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(path):
            return next(int(one.split()[1]) * 1024 for one in lines if one.startswith("Rss:"))
    raise AssertionError(f"{path} is not mapped")
