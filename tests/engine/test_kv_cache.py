"""The memory behind the KV blocks."""

import mmap
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.block_marks import BlockMarks
from engine.config import KvDtypeName
from engine.kernels.formats import KvFormat
from engine.kernels.library import load_library
from engine.kv_cache import KvCache, KvCacheLayout, KvSegmentError

KV_DTYPES: dict[KvFormat, KvDtypeName] = {
    KvFormat.FLOAT32: "float32",
    KvFormat.BFLOAT16: "bfloat16",
    KvFormat.INT8: "int8",
    KvFormat.FP8_E4M3: "fp8",
}
LAYOUT = KvCacheLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4, dtype="float32")


def test_a_block_is_one_range_of_bytes_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    cache = KvCache(LAYOUT, 5, str(path))

    cache.tensor[3].fill_(1.0)

    data = path.read_bytes()
    start, end = 3 * LAYOUT.block_bytes, 4 * LAYOUT.block_bytes
    assert len(data) == LAYOUT.generations_offset(5) + BlockMarks.num_bytes(5)
    assert torch.frombuffer(bytearray(data[start:end]), dtype=torch.float32).eq(1.0).all()
    assert not any(data[:start])
    assert not any(data[end:])
    cache.close()


def test_what_another_process_writes_into_the_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    cache = KvCache(LAYOUT, 2, str(path))

    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as other:
        other[LAYOUT.block_bytes : 2 * LAYOUT.block_bytes] = (
            torch.full((LAYOUT.block_bytes // 4,), 2.5).numpy().tobytes()
        )

    assert cache.tensor[1].eq(2.5).all()
    assert cache.tensor[0].eq(0.0).all()
    cache.close()


def test_marks_are_behind_the_blocks_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    cache = KvCache(LAYOUT, 3, str(path))

    cache.marks.generations[2] = 0x01020304
    cache.marks.filled[0] = 5
    cache.marks.bell.ring()
    cache.marks.next_tokens[1] = 6

    offset = LAYOUT.generations_offset(3)
    assert offset % mmap.PAGESIZE == 0
    assert offset >= 3 * LAYOUT.block_bytes
    numbers = struct.unpack("<10I", path.read_bytes()[offset:])
    assert numbers == (0, 0, 0x01020304, 5, 0, 0, 1, 0, 6, 0)
    cache.close()


def test_rows_are_the_same_memory(tmp_path: Path) -> None:
    cache = KvCache(LAYOUT, 2)

    # block 1, layer 0, values, head 2, token 3
    cache.rows[((1 * 2 + 0) * 2 + 1) * 12 + 2 * 4 + 3] = 7.0

    assert cache.tensor[1, 0, 1, 2, 3].eq(7.0).all()
    assert cache.tensor.sum() == 7.0 * 8


def test_closing_removes_the_file_and_may_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    cache = KvCache(LAYOUT, 2, str(path))
    held = cache.rows

    cache.close()
    cache.close()

    assert not path.exists()
    assert held.eq(0.0).all()


def test_a_segment_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    cache = KvCache(LAYOUT, 2, str(path))

    with pytest.raises(KvSegmentError, match="a running engine holds this segment"):
        KvCache(LAYOUT, 2, str(path))

    assert path.exists()
    cache.close()


def test_the_segment_of_a_killed_engine_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    code = (
        "import os; from engine.kv_cache import KvCache, KvCacheLayout;"
        f"cache = KvCache(KvCacheLayout(1, 1, 8, 4, 'float32'), 100, {str(path)!r});"
        "cache.memory.fill(9); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -9
    assert path.exists()

    cache = KvCache(LAYOUT, 2, str(path))

    assert path.stat().st_size == LAYOUT.generations_offset(2) + BlockMarks.num_bytes(2)
    assert cache.tensor.eq(0.0).all()
    cache.close()


def test_an_engine_that_ends_leaves_no_noise(tmp_path: Path) -> None:
    code = (
        "from engine.kv_cache import KvCache, KvCacheLayout;"
        f"cache = KvCache(KvCacheLayout(1, 1, 8, 4, 'float32'), 9, {str(tmp_path / 'kv')!r});"
        "rows = cache.rows; cache.close()"
    )

    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

    assert ended.stderr == b""


def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    cache = KvCache(LAYOUT, 1, str(path))

    assert path.stat().st_mode & 0o777 == 0o600
    cache.close()


def test_a_segment_that_cannot_be_made_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KvSegmentError, match="cannot create the segment"):
        KvCache(LAYOUT, 2, str(tmp_path / "missing" / "kv"))
    # More than any /dev/shm holds: refused at once rather than killed later.
    path = f"/dev/shm/pdmesh-test-{os.getpid()}"
    with pytest.raises(KvSegmentError, match="no room"):
        KvCache(LAYOUT, 1 << 40, path)

    assert not os.path.exists(path)


def test_a_segment_for_another_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvSegmentError, match="needs the CPU"):
        KvCache(LAYOUT, 2, str(tmp_path / "kv"), device="meta")


@pytest.mark.parametrize(
    ("dtype", "bytes_per_row"), [("float32", 32), ("bfloat16", 16), ("int8", 12), ("fp8", 12)]
)
def test_a_block_has_room_for_scales_in_the_8_bit_formats(
    dtype: KvDtypeName, bytes_per_row: int
) -> None:
    layout = KvCacheLayout(2, 3, 8, 4, dtype)

    assert layout.block_bytes == 2 * 2 * 3 * 4 * bytes_per_row


def test_the_kernels_blocks_are_as_large() -> None:
    library = load_library()
    if library is None:
        pytest.skip("the kernel library could not be built")
    for kv_format in KvFormat:
        dtype = KV_DTYPES[kv_format]
        layout = KvCacheLayout(2, 3, 8, 4, dtype)

        assert library.block_bytes(kv_format, 2, 3, 8, 4) == layout.block_bytes


# KV-25
@pytest.mark.parametrize(
    "other",
    [
        KvCacheLayout(3, 3, 8, 4, "float32"),
        KvCacheLayout(2, 1, 8, 4, "float32"),
        KvCacheLayout(2, 3, 16, 4, "float32"),
        KvCacheLayout(2, 3, 8, 8, "float32"),
        KvCacheLayout(2, 3, 8, 4, "bfloat16"),
        KvCacheLayout(2, 3, 8, 4, "float32", weights="int4"),
    ],
)
def test_layouts_that_differ_have_different_fields(other: KvCacheLayout) -> None:
    assert other.fields() != LAYOUT.fields()
    assert KvCacheLayout(2, 3, 8, 4, "float32").fields() == LAYOUT.fields()
