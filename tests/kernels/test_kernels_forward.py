"""Whole forward passes: against float64, and bit by bit across batches, chunks and threads."""

import subprocess
import sys
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from engine.kernels.formats import KvFormat, WeightFormat
from engine.kernels.library import KernelError, Library
from engine.kernels.native_llama import EMBEDDING_FORMATS, NativeLlama, pack_model
from engine.kernels.quantize import quantize
from tests.kernels.kernel_models import (
    Piece,
    Runner,
    SmallConfig,
    make_batch,
    make_runner,
    random_weights,
    reference_logits,
    rope_tables,
)

FORMATS = list(WeightFormat)
KV_FORMATS = list(KvFormat)
# More than two key segments, so that decoding splits attention between threads.
LENGTH = 530


def make_tokens(length: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(i) for i in rng.integers(0, SmallConfig().vocab_size, length)]


def shuffled_blocks(length: int, block_size: int = 4, seed: int = 0) -> list[int]:
    num_blocks = -(-length // block_size)
    return [int(i) for i in np.random.default_rng(seed).permutation(200)[:num_blocks]]


@pytest.mark.parametrize("level", ["amx", "avx512", "avx2", "portable"])
@pytest.mark.parametrize("tied", [False, True])
def test_float32_logits_agree_with_the_textbook(library: Library, level: str, tied: bool) -> None:
    if library.level(level) is None:
        pytest.skip(f"this machine has no {level}")
    config = SmallConfig(tie_word_embeddings=tied)
    token_ids = make_tokens(90)
    runner = make_runner(library, config=config, level=level)

    logits = runner.run(Piece(token_ids, 0, shuffled_blocks(90)))

    expected = reference_logits(config, random_weights(config), token_ids)
    assert np.abs(logits - expected).max() < 2e-4


def test_long_contexts_agree_with_the_textbook(library: Library) -> None:
    token_ids = make_tokens(LENGTH)
    runner = make_runner(library, num_threads=2)

    logits = runner.run(Piece(token_ids, 0, shuffled_blocks(LENGTH)))

    expected = reference_logits(SmallConfig(), random_weights(SmallConfig()), token_ids)
    assert np.abs(logits - expected).max() < 3e-4


@pytest.mark.parametrize("head_dim", [4, 16, 48, 64, 80, 128])
def test_any_head_size_agrees_with_the_textbook(library: Library, head_dim: int) -> None:
    config = SmallConfig(head_dim=head_dim, num_layers=1)
    token_ids = make_tokens(40)
    runner = make_runner(library, config=config)

    logits = runner.run(Piece(token_ids, 0, shuffled_blocks(40)))

    expected = reference_logits(config, random_weights(config), token_ids)
    assert np.abs(logits - expected).max() < 2e-4


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_quantized_weights_stay_close_to_float64_on_the_same_values(
    library: Library, weight_format: WeightFormat
) -> None:
    config = SmallConfig()
    token_ids = make_tokens(60)
    runner = make_runner(library, weight_format)

    logits = runner.run(Piece(token_ids, 0, shuffled_blocks(60)))

    embedding_format = EMBEDDING_FORMATS.get(weight_format, weight_format)
    same = {
        name: quantize(
            weight, embedding_format if "embed" in name or "head" in name else weight_format
        ).dequantize()
        if weight.ndim == 2
        else weight
        for name, weight in random_weights(config).items()
    }
    expected = reference_logits(config, same, token_ids)
    # Float formats and int8, with its sixteen-bit activations: little more than rounding of sums.
    is_grouped = weight_format in (WeightFormat.INT8_GROUPED, WeightFormat.INT4)
    is_wide = weight_format in (WeightFormat.INT8, WeightFormat.INT4_CHANNEL)
    allowed = 0.05 if is_grouped else 0.01 if is_wide else 1e-4
    assert np.sqrt(((logits - expected) ** 2).mean()) < allowed * expected.std()


@pytest.mark.parametrize("kv_format", KV_FORMATS, ids=lambda f: f.name)
def test_narrow_caches_stay_close_to_float64(library: Library, kv_format: KvFormat) -> None:
    token_ids = make_tokens(100)
    runner = make_runner(library, kv_format=kv_format)

    logits = runner.run(Piece(token_ids, 0, shuffled_blocks(100)))

    expected = reference_logits(SmallConfig(), random_weights(SmallConfig()), token_ids)
    allowed = {
        KvFormat.FLOAT32: 1e-4,
        KvFormat.BFLOAT16: 0.02,
        KvFormat.INT8: 0.03,
        KvFormat.FP8_E4M3: 0.15,
    }[kv_format]
    assert np.sqrt(((logits - expected) ** 2).mean()) < allowed * expected.std()


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("kv_format", KV_FORMATS, ids=lambda f: f.name)
def test_chunks_decoding_batches_and_threads_give_the_same_bits(
    library: Library, weight_format: WeightFormat, kv_format: KvFormat
) -> None:
    token_ids = make_tokens(LENGTH)
    whole = _run_whole(make_runner(library, weight_format, kv_format), token_ids)
    two_threads = make_runner(library, weight_format, kv_format, num_threads=2)

    assert np.array_equal(_run_whole(two_threads, token_ids), whole)
    for chunk in (16, 64, 256):
        assert np.array_equal(_run_chunks(two_threads, token_ids, chunk), whole)
    # Decode the tail, which crosses from one key segment into the next, one token at a time.
    decoding = make_runner(library, weight_format, kv_format, num_threads=2)
    blocks = shuffled_blocks(LENGTH, seed=3)
    decoding.run(Piece(token_ids[:505], 0, blocks))
    tail = [
        decoding.run(Piece(token_ids[position : position + 1], position, blocks))[0]
        for position in range(505, LENGTH)
    ]
    assert np.array_equal(np.stack(tail), whole[505:])


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_layers_one_by_one_with_others_in_between_give_the_same_bits(
    library: Library, weight_format: WeightFormat
) -> None:
    token_ids = make_tokens(LENGTH)
    whole = _run_whole(make_runner(library, weight_format), token_ids)
    runner = make_runner(library, weight_format, num_threads=2)
    batch = make_batch([Piece(token_ids, 0, shuffled_blocks(LENGTH))], runner.block_size)
    neighbour = Piece(make_tokens(40, seed=1), 0, range(200, 210))

    layers = runner.model.begin(batch, runner.cache, runner.num_blocks)
    num_layers = layers.num_layers_left
    for _ in range(num_layers - 1):
        assert layers.advance(1) is None
        runner.run(neighbour)

    assert num_layers == SmallConfig().num_layers
    logits = layers.advance(1)
    assert logits is not None
    assert np.array_equal(logits, whole)
    assert layers.num_layers_left == 0


def test_keys_and_values_are_written_before_there_are_logits(library: Library) -> None:
    token_ids = make_tokens(40)
    alone, runner = make_runner(library), make_runner(library, num_threads=2)
    whole = _run_whole(alone, token_ids)
    batch = make_batch([Piece(token_ids, 0, shuffled_blocks(40))], runner.block_size)
    seen: list[Any] = []

    layers = runner.model.begin(batch, runner.cache, runner.num_blocks)
    layers.advance(1)
    logits = layers.advance(layers.num_layers_left, lambda: seen.append(runner.cache.copy()))

    assert logits is not None
    assert np.array_equal(logits, whole)
    [cache] = seen
    assert np.array_equal(cache, alone.cache)


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_neighbours_in_random_batches_do_not_show(
    library: Library, weight_format: WeightFormat
) -> None:
    rng = np.random.default_rng(4)
    lengths = [3, 30, 70, 300]
    sequences = [make_tokens(length, seed=length) for length in lengths]
    expected = [
        _run_whole(make_runner(library, weight_format, KvFormat.BFLOAT16), token_ids)
        for token_ids in sequences
    ]
    runner = make_runner(library, weight_format, KvFormat.BFLOAT16, num_threads=2)
    free = iter(rng.permutation(runner.num_blocks).tolist())
    blocks = [[next(free) for _ in range(-(-length // 4))] for length in lengths]
    computed = [0] * len(lengths)

    while any(done < length for done, length in zip(computed, lengths, strict=True)):
        steps = [
            min(length - done, int(rng.choice([0, 1, 2, 5, 17, 50])))
            for done, length in zip(computed, lengths, strict=True)
        ]
        chosen = [int(i) for i in rng.permutation(len(lengths)) if steps[i]]
        if not chosen:
            continue
        logits = runner.run(
            *(
                Piece(sequences[i][computed[i] : computed[i] + steps[i]], computed[i], blocks[i])
                for i in chosen
            )
        )
        row = 0
        for i in chosen:
            wanted = expected[i][computed[i] : computed[i] + steps[i]]
            assert np.array_equal(logits[row : row + steps[i]], wanted)
            row += steps[i]
            computed[i] += steps[i]


@pytest.mark.parametrize("level", ["amx", "avx512", "avx2", "portable"])
@pytest.mark.parametrize("kv_format", KV_FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("block_size", [4, 5])
def test_sequences_that_share_blocks_have_the_bits_of_each_alone(
    library: Library, level: str, kv_format: KvFormat, block_size: int
) -> None:
    if library.level(level) is None:
        pytest.skip(f"this machine has no {level}")
    runner = make_runner(
        library,
        kv_format=kv_format,
        num_threads=2,
        level=level,
        block_size=block_size,
        num_blocks=600,
    )
    stem = make_tokens(560)
    branch = stem[:300] + make_tokens(260, seed=1)
    free = iter(range(runner.num_blocks))
    stem_blocks = list(islice(free, 560 // block_size))
    branch_blocks = stem_blocks[: 300 // block_size] + list(islice(free, 260 // block_size))
    runner.run(Piece(stem, 0, stem_blocks))
    runner.run(Piece(branch[300:], 300, branch_blocks))
    # Tokens, how many of them are another's, and how many the step computes. Eighteen rows are
    # more than one piece takes.
    forest = [
        *((stem[:540] + make_tokens(4, seed=i), 540, 1) for i in range(2, 20)),
        (stem[:540] + make_tokens(9, seed=20), 540, 8),
        (branch + make_tokens(3, seed=21), 560, 2),
        (branch + make_tokens(8, seed=22), 560, 5),
        (stem[:240] + make_tokens(200, seed=23), 240, 1),  # shares less than a segment
        # Share three chunks of the second segment, or two, and go on by themselves.
        *((stem[:460] + make_tokens(20, seed=i), 460, 2) for i in range(30, 40)),
        *((stem[:400] + make_tokens(150, seed=i), 400, 5) for i in range(40, 42)),
        (stem[:514], 500, 2),  # its rows begin where the second segment ends
        (stem[:513], 500, 2),  # and one before
        *[(stem[:515], 515, 5)] * 2,  # some of its rows are in what others have as well
        (stem[:540] + make_tokens(40, seed=24), 540, 30),  # too many rows
    ]
    pieces = []
    for token_ids, num_shared, num_rows in forest:
        parents = branch_blocks if token_ids[:560] == branch else stem_blocks
        shared = parents[: num_shared // block_size]
        blocks = [*shared, *islice(free, -(-len(token_ids) // block_size) - len(shared))]
        first, end = len(shared) * block_size, len(token_ids) - num_rows
        if first < end:
            runner.run(Piece(token_ids[first:end], first, blocks))
        pieces.append(Piece(token_ids[end:], end, blocks))

    alone = [runner.run(piece) for piece in pieces]
    together = runner.run(*pieces)

    assert np.array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("kv_format", [KvFormat.BFLOAT16, KvFormat.INT8, KvFormat.FP8_E4M3])
def test_all_levels_give_the_same_bits(
    library: Library, weight_format: WeightFormat, kv_format: KvFormat
) -> None:
    token_ids = make_tokens(70)

    results = [
        _run_whole(make_runner(library, weight_format, kv_format, level=level), token_ids)
        for level in library.levels()
    ]

    for result in results[1:]:
        assert np.array_equal(result, results[0])


@pytest.mark.parametrize("kv_format", KV_FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize(
    ("head_dim", "block_size", "num_heads"), [(20, 4, 6), (64, 16, 6), (64, 5, 2), (96, 32, 8)]
)
@pytest.mark.parametrize("extreme", ["tiny values", "tiny scores", "large scores", "zeros"])
def test_attention_has_the_same_bits_at_every_level(
    library: Library,
    kv_format: KvFormat,
    head_dim: int,
    block_size: int,
    num_heads: int,
    extreme: str,
) -> None:
    config = SmallConfig(head_dim=head_dim, num_heads=num_heads, num_layers=1)
    weights = random_weights(config)
    scales = {
        "tiny values": {"v_proj": 2.0**-124, "o_proj": 2.0**124},  # many are denormal numbers
        "tiny scores": {"q_proj": 2.0**-70, "k_proj": 2.0**-60},
        "large scores": {"q_proj": 8.0, "k_proj": 8.0},  # most weights come out as zero
        "zeros": {"k_proj": 0.0, "v_proj": -0.0},
    }[extreme]
    for name, scale in scales.items():
        weights[f"model.layers.0.self_attn.{name}.weight"] *= np.float32(scale)
    token_ids = make_tokens(340)
    blocks = shuffled_blocks(340, block_size)

    results = []
    for level in library.levels():
        runner = make_runner(
            library,
            kv_format=kv_format,
            config=config,
            weights=weights,
            level=level,
            block_size=block_size,
        )
        many = runner.run(Piece(token_ids[:330], 0, blocks))
        few = runner.run(Piece(token_ids[330:332], 330, blocks))
        several = runner.run(Piece(token_ids[332:], 332, blocks))
        results.append(np.concatenate((many, few, several)).view(np.uint32))

    assert np.isfinite(results[0].view(np.float32)).all()
    for result in results[1:]:
        assert np.array_equal(result, results[0])


def test_the_block_size_does_not_show(library: Library) -> None:
    token_ids = make_tokens(300)

    results = [
        make_runner(library, block_size=block_size).run(
            Piece(token_ids, 0, shuffled_blocks(300, block_size))
        )
        for block_size in (2, 5, 16, 64)
    ]

    for result in results[1:]:
        assert np.array_equal(result, results[0])


def test_only_the_wanted_rows_have_logits(library: Library) -> None:
    token_ids = make_tokens(20)
    runner = make_runner(library)
    whole = runner.run(Piece(token_ids, 0, shuffled_blocks(20)))
    batch = replace(
        make_batch([Piece(token_ids, 0, shuffled_blocks(20))], 4), logits_rows=np.array([19, 3])
    )

    logits = runner.model.forward(batch, runner.cache, runner.num_blocks)

    assert np.array_equal(logits, whole[[19, 3]])


def test_keys_and_values_lie_where_the_layout_says(library: Library) -> None:
    config = SmallConfig(num_layers=1)
    runner = make_runner(library, config=config)

    runner.run(Piece([7, 8], 0, [5]))

    shape = (runner.num_blocks, 1, 2, config.num_kv_heads, 4, config.head_dim)
    cache = runner.cache.view(np.float32).reshape(shape)
    written = np.asarray(np.isfinite(cache).all(axis=-1))
    assert written.sum() == 2 * 2 * config.num_kv_heads
    assert written[5, 0, :, :, :2].all()
    weights = {k: v.astype(np.float64) for k, v in random_weights(config).items()}
    x = weights["model.embed_tokens.weight"][7]
    h = x / np.sqrt((x * x).mean() + 1e-5) * weights["model.layers.0.input_layernorm.weight"]
    value = h @ weights["model.layers.0.self_attn.v_proj.weight"].T
    assert np.allclose(cache[5, 0, 1, :, 0].reshape(-1), value, atol=1e-4)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", [131], "token id"),
        ("token_ids", [-1], "token id"),
        ("positions", [3], "positions"),
        ("slot_mapping", [4096], "slot"),
        ("block_tables", [[300]], "block"),
        ("block_tables", [[-1]], "block"),
        ("logits_rows", [1], "row"),
        ("seq_lens", [5000], "positions"),
        ("query_starts", [0, 2], "row"),
    ],
)
def test_an_index_out_of_range_is_refused_before_any_memory_is_touched(
    library: Library, field: str, value: list[int], message: str
) -> None:
    runner = make_runner(library)
    changed: dict[str, Any] = {field: np.array(value)}
    batch = replace(make_batch([Piece([1], 0, [0])], 4), **changed)

    with pytest.raises(KernelError, match=message):
        runner.model.forward(batch, runner.cache, runner.num_blocks)


def test_layers_that_there_are_not_are_refused(library: Library) -> None:
    runner = make_runner(library)
    batch = make_batch([Piece([1], 0, [0])], runner.block_size)
    layers = runner.model.begin(batch, runner.cache, runner.num_blocks)
    layers.advance(layers.num_layers_left)

    with pytest.raises(KernelError, match="layers"):
        layers.advance(1)


def test_arrays_of_different_lengths_are_refused(library: Library) -> None:
    runner = make_runner(library)
    batch = replace(make_batch([Piece([1], 0, [0])], 4), positions=np.array([0, 1]))

    with pytest.raises(ValueError, match="different lengths"):
        runner.model.forward(batch, runner.cache, runner.num_blocks)


def test_a_closed_model_is_refused(library: Library) -> None:
    runner = make_runner(library, num_threads=2)
    runner.model.close()

    with pytest.raises(KernelError, match="closed"):
        runner.run(Piece([1], 0, [0]))


def test_threads_that_the_system_does_not_have_are_an_error_and_no_crash(library: Library) -> None:
    # A thread's stack takes some megabytes of addresses.
    code = """
import resource
from engine.kernels.library import KernelError, load_library
from tests.kernels.kernel_models import Piece, make_runner
library = load_library()
with open("/proc/self/statm") as statm:
    num_bytes = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (num_bytes + (256 << 20),) * 2)
try:
    make_runner(library, num_threads=10_000)
except KernelError as error:
    print(error)
print(make_runner(library, num_threads=2).run(Piece([1], 0, [0])).shape)
"""

    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert ended.stdout == "out of memory or threads\n(1, 131)\n"


def test_a_head_size_that_the_kernels_lack_is_refused(library: Library) -> None:
    config = SmallConfig(head_dim=6)
    weights = pack_model(config, random_weights(config), WeightFormat.FLOAT32)

    with pytest.raises(KernelError, match="configuration"):
        NativeLlama(library, config, weights, rope_tables(6))


def _run_whole(runner: Runner, token_ids: list[int]) -> np.ndarray:
    logits: np.ndarray = runner.run(Piece(token_ids, 0, shuffled_blocks(len(token_ids))))
    return logits


def _run_chunks(runner: Runner, token_ids: list[int], chunk: int) -> np.ndarray:
    blocks = shuffled_blocks(len(token_ids), seed=chunk)
    return np.concatenate(
        [
            runner.run(Piece(token_ids[start : start + chunk], start, blocks))
            for start in range(0, len(token_ids), chunk)
        ]
    )
