"""Each kernel against what the machine can do: `python -m benchmarks.kernels --help`.

Random weights in the default model's shape. With one thread, times are CPU time of the thread, so
that they mean something on a machine that is shared; with more they are wall-clock times.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.kernels.formats import KvFormat, WeightFormat
from engine.kernels.library import SAMPLING_DTYPE, Library, address, linear_struct, load_library
from engine.kernels.native_llama import NativeLlama, PackedModel, pack_model
from engine.kernels.pack import Arena, PackedMatrix, pack
from engine.kernels.quantize import quantize

Array = npt.NDArray[Any]

BLOCK_SIZE = 16
MATRICES = ((3072, 576), (576, 1536))


@dataclass(frozen=True)
class Shape:
    """SmolLM2-135M."""

    num_layers: int = 30
    hidden_size: int = 576
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 1536
    vocab_size: int = 49152
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True


@dataclass(frozen=True)
class StepBatch:
    token_ids: Array
    positions: Array
    slot_mapping: Array
    query_starts: list[int]
    seq_lens: list[int]
    block_tables: Array
    logits_rows: Array


@dataclass(frozen=True)
class Limits:
    """What the hardware gives the threads in use."""

    read_bytes_per_s: float
    dot_gops: float


@dataclass(frozen=True)
class Bench:
    library: Library
    num_threads: int
    num_rounds: int

    def best(self, run: Callable[[], object]) -> float:
        """Seconds of the fastest round: others on the machine only ever make it slower."""
        clock = time.thread_time if self.num_threads == 1 else time.perf_counter
        run()
        times = []
        for _ in range(self.num_rounds):
            start = clock()
            run()
            times.append(clock() - start)
        return min(times)

    def limits(self) -> Limits:
        memory = np.ones(1 << 29, dtype=np.uint8)
        functions = self.library.functions

        def read() -> None:
            functions.pdmesh_read_seconds(address(memory), memory.nbytes, self.num_threads)

        gops = max(functions.pdmesh_dot_gops(None) for _ in range(5)) * self.num_threads
        return Limits(memory.nbytes / self.best(read), gops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--weights", nargs="*", default=["int8", "int8_grouped", "int4", "bfloat16"]
    )
    parser.add_argument("--kv", default="bfloat16")
    arguments = parser.parse_args()
    library = load_library()
    if library is None:
        raise SystemExit("no compiler, no kernels")
    bench = Bench(library, arguments.threads, arguments.rounds)
    limits = bench.limits()
    print(f"level {library.level()}, {bench.num_threads} thread(s)")
    print(f"read {limits.read_bytes_per_s / 1e9:.1f} GB/s, 8-bit dot {limits.dot_gops:.0f} GOP/s")
    for name in arguments.weights:
        weight_format = WeightFormat.from_name(name)
        print(f"\n{name}")
        report_matrices(bench, limits, weight_format)
        report_steps(bench, limits, weight_format, KvFormat.from_name(arguments.kv))


def report_matrices(bench: Bench, limits: Limits, weight_format: WeightFormat) -> None:
    rng = np.random.default_rng(0)
    for n, k in MATRICES:
        matrix, arena = _aligned(
            pack(quantize(rng.standard_normal((n, k), dtype=np.float32), weight_format))
        )
        for num_rows in (1, 4, 8, 16, 64, 256):
            x = rng.standard_normal((num_rows, k), dtype=np.float32)
            seconds = _linear_seconds(bench, matrix, x)
            gops = 2 * n * k * num_rows / seconds / 1e9
            print(
                f"  {n} x {k}, {num_rows:3} rows: {seconds * 1e6:7.1f} us, {gops:5.0f} GOP/s"
                f" = {100 * gops / limits.dot_gops:3.0f}% of the dot peak"
            )
        del arena


def report_steps(
    bench: Bench, limits: Limits, weight_format: WeightFormat, kv_format: KvFormat
) -> None:
    config = Shape()
    packed = _random_model(config, weight_format)
    num_blocks = 512
    with NativeLlama(
        bench.library,
        config,
        packed,
        _rope(config, 8192),
        kv_format=kv_format,
        block_size=BLOCK_SIZE,
        num_threads=bench.num_threads,
    ) as model:
        # Zeros are valid in every format, and touched pages are what an engine has.
        cache = np.zeros(num_blocks * model.block_bytes, dtype=np.uint8)
        for num_seqs, context in ((1, 100), (2, 100), (4, 100), (8, 100), (16, 100), (1, 1600)):
            batch = _batch(num_seqs, context, 1)
            seconds = bench.best(partial(model.forward, batch, cache, num_blocks))
            kv_bytes = num_seqs * context * model.block_bytes / BLOCK_SIZE
            least = (packed.num_bytes + kv_bytes) / limits.read_bytes_per_s
            print(
                f"  decode, {num_seqs:2} x {context:4} tokens: {seconds * 1e3:6.2f} ms,"
                f" {100 * least / seconds:3.0f}% of the bandwidth limit"
            )
        for num_rows, context in ((64, 0), (256, 0), (256, 1344)):
            batch = _batch(1, context, num_rows)
            seconds = bench.best(partial(model.forward, batch, cache, num_blocks))
            print(
                f"  prefill {num_rows} after {context}: {seconds * 1e3:6.1f} ms,"
                f" {num_rows / seconds:6.0f} tokens/s"
            )
        report_sampling(bench, model)


def report_sampling(bench: Bench, model: NativeLlama) -> None:
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((16, model.vocab_size)) * 3).astype(np.float32)
    for name, fields in (
        ("greedy", {"temperature": 0}),
        ("temperature", {"temperature": 1, "top_p": 1}),
        ("top-p 0.95", {"temperature": 1, "top_p": 0.95}),
        ("top-k 50, top-p 0.9", {"temperature": 0.8, "top_p": 0.9, "top_k": 50}),
    ):
        params = np.zeros(16, dtype=SAMPLING_DTYPE)
        for field, value in fields.items():
            params[field] = value
        seconds = bench.best(partial(model.sample, logits, params))
        print(f"  sample 16 rows, {name}: {seconds * 1e3:.2f} ms")


def _linear_seconds(bench: Bench, matrix: PackedMatrix, x: Array) -> float:
    out = np.empty((len(x), matrix.n), dtype=np.float32)
    struct = linear_struct(matrix)
    function = bench.library.functions.pdmesh_linear_forward

    def run(num_repeats: int) -> None:
        rows = (address(x), len(x), x.shape[1])
        status = function(
            None, struct, *rows, address(out), matrix.n, bench.num_threads, num_repeats
        )
        bench.library.check(status)

    # Quantizing the rows and starting threads is in both, and not in the difference.
    many = max(2, 400 // len(x))
    return max(bench.best(lambda: run(many + 1)) - bench.best(lambda: run(1)), 1e-9) / many


def _random_model(config: Shape, weight_format: WeightFormat) -> PackedModel:
    rng = np.random.default_rng(0)

    def matrix(n: int, k: int) -> Array:
        return rng.standard_normal((n, k), dtype=np.float32) / np.float32(k**0.5)

    hidden, intermediate = config.hidden_size, config.intermediate_size
    keys = config.num_kv_heads * config.head_dim
    weights: dict[str, Array] = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden),
        "model.norm.weight": np.ones(hidden, dtype=np.float32),
    }
    layer = {
        "self_attn.q_proj": matrix(hidden, hidden),
        "self_attn.k_proj": matrix(keys, hidden),
        "self_attn.v_proj": matrix(keys, hidden),
        "self_attn.o_proj": matrix(hidden, hidden),
        "mlp.gate_proj": matrix(intermediate, hidden),
        "mlp.up_proj": matrix(intermediate, hidden),
        "mlp.down_proj": matrix(hidden, intermediate),
        "input_layernorm": np.ones(hidden, dtype=np.float32),
        "post_attention_layernorm": np.ones(hidden, dtype=np.float32),
    }
    for i in range(config.num_layers):
        weights |= {f"model.layers.{i}.{name}.weight": values for name, values in layer.items()}
    return pack_model(config, weights, weight_format)


def _aligned(matrix: PackedMatrix) -> tuple[PackedMatrix, Arena]:
    arrays = {"data": matrix.data}
    if matrix.scales is not None:
        arrays["scales"] = matrix.scales
    arena = Arena(arrays)
    return (
        PackedMatrix(matrix.format, matrix.n, matrix.k, arena["data"], arena.get("scales")),
        arena,
    )


def _rope(config: Shape, num_positions: int) -> tuple[Array, Array]:
    frequencies = 100000.0 ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    angles = np.arange(num_positions)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _batch(num_seqs: int, context: int, num_rows: int) -> StepBatch:
    """`num_rows` tokens of each sequence, after `context`; logits of each one's last."""
    width = -(-(context + num_rows) // BLOCK_SIZE)
    tables = np.arange(num_seqs * width).reshape(num_seqs, width)
    positions = np.tile(np.arange(context, context + num_rows), num_seqs)
    sequence = np.repeat(np.arange(num_seqs), num_rows)
    blocks = tables[sequence, positions // BLOCK_SIZE]
    return StepBatch(
        token_ids=np.arange(num_seqs * num_rows) * 7919 % 49152,
        positions=positions,
        slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=[i * num_rows for i in range(num_seqs + 1)],
        seq_lens=[context + num_rows] * num_seqs,
        block_tables=tables,
        logits_rows=np.arange(1, num_seqs + 1) * num_rows - 1,
    )


if __name__ == "__main__":
    main()
