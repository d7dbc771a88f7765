"""Which backend and formats an engine gets, weights that are packed once, draws that agree."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.build import build_engine
from engine.config import EngineConfig, KernelLevel, ModelConfig
from engine.forward_batch import SequenceSlice, build_batch
from engine.kernels.library import SAMPLING_DTYPE, Library, load_library
from engine.kv_cache import KvCache
from engine.models import native_weights
from engine.models.native import NativeModel
from engine.models.native_weights import SOURCE_GGUF, WeightsName, load_packed
from engine.models.registry import BackendError, Choice, choose, has_tiles, load_model
from engine.request import Request
from engine.sampling import SamplingParams, draw_tokens
from tests.fakes import ContentHasher, run_to_end, token_ids_of
from tests.tiny_llama import make_tiny_model

needs_kernels = pytest.mark.skipif(load_library() is None, reason="the kernels could not be built")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path)
    return tmp_path


def choice(folder: Path, **values: Any) -> Choice:
    return choose(EngineConfig(folder, **values), ModelConfig.from_folder(folder), 256)


@needs_kernels
def test_auto_is_native_with_the_stored_numbers(folder: Path) -> None:
    assert choice(folder) == Choice("native", "float32", "float32")
    assert choice(folder, dtype="bfloat16") == Choice("native", "bfloat16", "bfloat16")
    assert choice(folder, backend="torch") == Choice("torch", "float32", "float32")


@needs_kernels
def test_auto_takes_the_quantized_values_that_a_model_was_made_from(folder: Path) -> None:
    (folder / SOURCE_GGUF).touch()

    weights: WeightsName = "int4_channel" if has_tiles(EngineConfig(folder)) else "int4"
    assert choice(folder) == Choice("native", weights, "bfloat16")
    assert choice(folder, kv_cache_dtype="fp8") == Choice("native", weights, "fp8")
    assert choice(folder, quantization="int4").weights == "int4"
    assert choice(folder, quantization="none").weights == "float32"
    assert choice(folder, kernel_level="portable").weights == "int4"
    # Who asks for a dtype does not get fewer bits.
    assert choice(folder, dtype="float32").weights == "float32"
    assert choice(folder, backend="torch").weights == "float32"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backend": "torch", "quantization": "int8"}, "quantization int8 needs the native"),
        ({"backend": "torch", "kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8 needs the native"),
        ({"backend": "torch", "kv_cache_dtype": "bfloat16"}, "bfloat16 with float32 needs"),
        ({"backend": "torch", "kernel_level": "avx2"}, "kernel_level avx2 needs the native"),
        ({"backend": "native", "device": "cuda"}, "device is cuda"),
        ({"device": "cuda", "quantization": "int4"}, "needs the native backend: device is cuda"),
    ],
)
def test_what_nothing_here_can_run_is_refused(
    folder: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        choice(folder, **values)


def test_without_the_library_torch_serves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.registry.load_library", lambda: None)

    assert choice(folder).backend == "torch"
    with pytest.raises(BackendError, match="could not be built"):
        choice(folder, backend="native")


@needs_kernels
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_a_level_that_the_cpu_does_not_have_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(Library, "level", lambda self, name=None: "avx2" if name is None else None)

    with pytest.raises(BackendError, match="this CPU has"):
        choice(folder, backend=backend, kernel_level="amx")


@needs_kernels
def test_levels_give_the_same_logits(folder: Path) -> None:
    def logits(level: KernelLevel) -> Any:
        config = EngineConfig(
            folder, backend="native", quantization="int8", num_blocks=8, kernel_level=level
        )
        loaded = load_model(config, ModelConfig.from_folder(folder), 64)
        batch = build_batch([SequenceSlice([3, 4, 5, 6, 7], 0, [0])], config.block_size)
        cache = KvCache(loaded.layout, 8)
        try:
            return loaded.model.forward(batch, cache).copy()
        finally:
            loaded.model.close()
            cache.close()

    library = load_library()
    assert library is not None
    first, *others = (logits(level) for level in get_args(KernelLevel) if library.level(level))

    assert all(np.array_equal(first, other) for other in others)


@needs_kernels
def test_weights_are_packed_once_and_then_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_folder(folder)
    first = load_packed(folder, config, "int8")
    monkeypatch.setattr(native_weights, "_pack", _refuse)

    second = load_packed(folder, config, "int8")

    for name in ("embedding.data", "0.qkv.scales", "1.post_attention_norm"):
        assert np.array_equal(first.arena[name], second.arena[name])
        with pytest.raises(ValueError, match="read-only"):
            second.arena[name][:] = 0


def _refuse(*_: object) -> None:
    raise AssertionError("packed again")


@needs_kernels
def test_packed_weights_are_read_where_nothing_can_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_folder(folder)
    load_packed(folder, config, "int8")
    # As root may write into read-only folders: a lock that nobody can open.
    (folder / ".packed" / ".lock").unlink()
    (folder / ".packed" / ".lock").mkdir()
    monkeypatch.setattr(native_weights, "_pack", _refuse)

    load_packed(folder, config, "int8")


@needs_kernels
@pytest.mark.parametrize("num_bytes", [0, 4, 100, 5000])
def test_a_packed_file_that_is_cut_off_is_made_again(folder: Path, num_bytes: int) -> None:
    config = ModelConfig.from_folder(folder)
    load_packed(folder, config, "float32")
    [path] = (folder / ".packed").glob("float32-*")
    whole = path.read_bytes()
    path.write_bytes(whole[:num_bytes])

    load_packed(folder, config, "float32")

    assert path.read_bytes() == whole


@needs_kernels
@pytest.mark.parametrize("at", [8, 9, -1])
def test_a_packed_file_with_a_wrong_byte_is_made_again(folder: Path, at: int) -> None:
    config = ModelConfig.from_folder(folder)
    load_packed(folder, config, "int4")
    [path] = (folder / ".packed").glob("int4-*")
    whole = path.read_bytes()
    wrong = bytearray(whole)
    wrong[at] ^= 1
    path.write_bytes(wrong)

    load_packed(folder, config, "int4")

    assert path.read_bytes() == whole


@needs_kernels
@pytest.mark.parametrize("described", [rb'"0.qkv": \[', rb'"0.qkv.data": \["\|u1", ', rb"matri"])
def test_a_packed_file_with_a_wrong_description_is_made_again(
    folder: Path, described: bytes
) -> None:
    config = ModelConfig.from_folder(folder)
    load_packed(folder, config, "int4")
    [path] = (folder / ".packed").glob("int4-*")
    whole = path.read_bytes()
    found = re.search(described, whole)
    assert found is not None
    wrong = bytearray(whole)
    # A digit is another digit then, a letter another letter.
    wrong[found.end()] ^= 1
    path.write_bytes(wrong)

    load_packed(folder, config, "int4")

    assert path.read_bytes() == whole


@needs_kernels
def test_of_workers_that_start_at_once_one_packs_and_all_get_the_same(folder: Path) -> None:
    code = (
        "import sys, logging, hashlib; from pathlib import Path; logging.basicConfig(level=20)\n"
        "from engine.config import ModelConfig\n"
        "from engine.models.native_weights import load_packed\n"
        "folder = Path(sys.argv[1]); config = ModelConfig.from_folder(folder)\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "arena = load_packed(folder, config, 'int8').arena\n"
        "print(hashlib.sha256(b''.join(arena[key].tobytes() for key in sorted(arena))).hexdigest())"
    )
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"

    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()

    results = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], results
    assert len({digest for digest, _ in results}) == 1
    assert sum("packing weights, once" in log for _, log in results) == 1
    assert [path.name for path in (folder / ".packed").glob("int8-*")] == [
        path.name for path in (folder / ".packed").iterdir() if path.name != ".lock"
    ]


@needs_kernels
def test_other_weights_replace_the_packed_ones(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    before = load_packed(folder, config, "int4")
    kept = before.arena["0.down.data"].copy()
    make_tiny_model(folder, seed=1)

    after = load_packed(folder, config, "int4")

    assert len(list((folder / ".packed").glob("int4-*"))) == 1
    assert not np.array_equal(after.arena["0.down.data"], kept)
    # Who has read the old ones keeps them.
    assert np.array_equal(before.arena["0.down.data"], kept)


@needs_kernels
def test_models_that_share_a_folder_for_packed_weights_leave_each_other_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "a" / "model", tmp_path / "b" / "model"]
    for seed, folder in enumerate(folders):
        make_tiny_model(folder, seed=seed)
    config = ModelConfig.from_folder(folders[0])
    first = [load_packed(folder, config, "int8", tmp_path / "packed") for folder in folders]
    monkeypatch.setattr(native_weights, "_pack", _refuse)

    second = [load_packed(folder, config, "int8", tmp_path / "packed") for folder in folders]

    for before, after in zip(first, second, strict=True):
        assert np.array_equal(before.arena["0.down.data"], after.arena["0.down.data"])


@needs_kernels
def test_a_folder_that_cannot_be_written_packs_in_memory(folder: Path, tmp_path: Path) -> None:
    # A file where the folder should be: root may write into read-only folders.
    (tmp_path / "taken").touch()
    engine = build_engine(
        EngineConfig(folder, num_blocks=8, packed_weights_dir=tmp_path / "taken"),
        lambda fields: ContentHasher(),
    )
    shutil.rmtree(folder / ".packed", ignore_errors=True)
    request = Request("r", [5, 6, 7], SamplingParams(4, temperature=0.0, ignore_eos=True))

    assert len(token_ids_of(run_to_end(engine, request)["r"])) == 4
    engine.close()


def test_a_worker_does_not_load_torch() -> None:
    code = "import sys, decode_svc.service, prefill_svc.service, worker.host as w; "
    code += "assert w and 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def native_model(tmp_path_factory: pytest.TempPathFactory) -> NativeModel:
    if load_library() is None:
        pytest.skip("the kernels could not be built")
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, vocab_size=1531)
    config = EngineConfig(folder, backend="native", num_threads=2)
    model = load_model(config, ModelConfig.from_folder(folder), 256).model
    assert isinstance(model, NativeModel)
    return model


@settings(max_examples=150)
@given(
    row_seed=st.integers(0, 1000),
    scale=st.sampled_from([0.01, 1.0, 4.0]),
    is_coarse=st.booleans(),
    params=st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1),
            st.integers(0, 8000),
            st.sampled_from([0.0, 0.3, 1.0, 1.7]),
            st.sampled_from([0.0, 0.3, 0.9, 0.999999, 1.0]),
            st.sampled_from([0.0, 0.05, 0.5, 1.0]),
            st.sampled_from([0, 1, 3, 50, 1200, 1531]),
        ),
        min_size=1,
        max_size=9,
    ),
)
def test_the_kernels_draw_the_tokens_that_the_sampler_draws_without_them(
    native_model: NativeModel, row_seed: int, scale: float, is_coarse: bool, params: list[Any]
) -> None:
    drawn = np.random.default_rng(row_seed).standard_normal((len(params), 1531))
    if is_coarse:
        drawn = (drawn * 4).round() / 4
    logits = (drawn * scale).astype(np.float32)
    logits[0, row_seed % 1531] = (-np.inf, np.nan, np.inf, 0.0)[row_seed % 4]
    rows = np.array(params, dtype=SAMPLING_DTYPE)

    expected = draw_tokens(logits.copy(), rows)

    assert native_model.draw(logits, rows).tolist() == expected.tolist()
