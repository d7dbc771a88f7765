"""Run as a program by test_kernels_sanitizers: every format and level, in an instrumented build."""

import sys
from itertools import cycle

import numpy as np

from engine.kernels.formats import KvFormat, WeightFormat
from engine.kernels.library import SAMPLING_DTYPE, Library
from tests.kernels.kernel_models import Piece, SmallConfig, make_runner


def main(path: str) -> None:
    library = Library(path)
    rng = np.random.default_rng(0)
    tokens = [int(i) for i in rng.integers(0, SmallConfig().vocab_size, 300)]
    for level in library.levels():
        for weight_format, kv_format in zip(WeightFormat, cycle(KvFormat), strict=False):
            runner = make_runner(library, weight_format, kv_format, num_threads=2, level=level)
            long_blocks, short_blocks = list(range(80)), list(range(255, 245, -1))
            runner.run(Piece(tokens[:290], 0, long_blocks), Piece(tokens[:9], 0, short_blocks))
            logits = runner.run(
                Piece(tokens[290:291], 290, long_blocks), Piece(tokens[9:30], 9, short_blocks)
            )
            # They share a segment, or most of one.
            for num_shared in (280, 200):
                shared = long_blocks[: num_shared // 4]
                forks = [[*shared, *range(n, n + 30)] for n in (100, 130)]
                runner.run(*(Piece(tokens[num_shared:284], num_shared, one) for one in forks))
                runner.run(*(Piece(tokens[284:285], 284, blocks) for blocks in forks))
            params = np.zeros(len(logits), dtype=SAMPLING_DTYPE)
            params["temperature"], params["top_p"] = 1, np.linspace(0, 1, len(logits))
            params["top_k"] = np.arange(len(logits))
            assert (runner.model.sample(logits, params) >= 0).all()
            runner.model.close()
    print("clean", *library.levels())


if __name__ == "__main__":
    main(sys.argv[1])
