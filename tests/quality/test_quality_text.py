"""Perplexity, KL and agreement against plain definitions, however the text is cut into steps."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.build import build_engine
from engine.config import EngineConfig
from engine.forward_batch import SequenceSlice
from mesh.block_keys import BlockKeys, layout_fingerprint
from quality.gate import read_texts
from quality.text_quality import SliceRunner, Window, compare_on_texts
from tests.tiny_llama import make_tiny_model

VOCAB = 7
WINDOW = Window(num_tokens=8, chunk=3, block_size=4)


class TableRunner:
    """Logits by token and position; keeps what it was asked."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self.slices: list[SequenceSlice] = []

    def forward(self, slices: Sequence[SequenceSlice]) -> npt.NDArray[np.float32]:
        (part,) = slices
        self.slices.append(part)
        assert part.num_logits == len(part.token_ids)
        positions = torch.arange(len(part.token_ids)) + part.num_computed_tokens
        scale = (1 + 0.1 * positions)[:, None]
        logits = self._table[torch.tensor(list(part.token_ids))] * scale
        return logits.numpy()


def table(seed: int) -> Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


def tokens(count: int) -> list[int]:
    return [(index * 3 + index // 4) % VOCAB for index in range(count)]


def test_a_runner_agrees_with_itself() -> None:
    quality = compare_on_texts(
        TableRunner(table(1)), TableRunner(table(1)), {"t": tokens(30)}, WINDOW
    )["all"]

    assert quality.perplexity_increase == 0
    assert quality.mean_kl == quality.max_kl == 0
    assert quality.top1_agreement == 1


def test_the_numbers_are_those_of_the_definitions() -> None:
    token_ids = tokens(8)
    reference, candidate = table(1), table(2)
    scale = (1 + 0.1 * torch.arange(7))[:, None]
    p = torch.softmax((reference[torch.tensor(token_ids[:-1])] * scale).double(), -1)
    q = torch.softmax((candidate[torch.tensor(token_ids[:-1])] * scale).double(), -1)
    following = torch.tensor(token_ids[1:])

    quality = compare_on_texts(
        TableRunner(reference), TableRunner(candidate), {"t": token_ids}, WINDOW
    )["t"]

    rows = torch.arange(7)
    assert quality.num_tokens == 7
    assert quality.reference_perplexity == pytest.approx(math.exp(-p[rows, following].log().mean()))
    assert quality.candidate_perplexity == pytest.approx(math.exp(-q[rows, following].log().mean()))
    kl = (p * (p / q).log()).sum(-1)
    assert quality.mean_kl == pytest.approx(float(kl.mean()))
    assert quality.max_kl == pytest.approx(float(kl.max()))
    same = (p.argmax(-1) == q.argmax(-1)).double().mean()
    assert quality.top1_agreement == pytest.approx(float(same))


def test_windows_start_afresh_and_every_token_is_seen_once() -> None:
    runner = TableRunner(table(1))

    quality = compare_on_texts(runner, TableRunner(table(1)), {"t": tokens(19)}, WINDOW)["t"]

    seen = [(part.num_computed_tokens, len(part.token_ids)) for part in runner.slices]
    assert seen == [(0, 3), (3, 3), (6, 2), (0, 3), (3, 3), (6, 2), (0, 3)]
    assert [token for part in runner.slices for token in part.token_ids] == tokens(19)
    # The first token of a window is predicted by nothing.
    assert quality.num_tokens == 19 - 3
    assert all(list(part.block_ids) == [0, 1] for part in runner.slices)


def test_all_is_weighted_by_tokens() -> None:
    texts = {"long": tokens(30), "short": tokens(5)}

    found = compare_on_texts(TableRunner(table(1)), TableRunner(table(2)), texts, WINDOW)

    long, short, whole = found["long"], found["short"], found["all"]
    assert whole.num_tokens == long.num_tokens + short.num_tokens
    expected = long.mean_kl * long.num_tokens + short.mean_kl * short.num_tokens
    assert whole.mean_kl == pytest.approx(expected / whole.num_tokens)


def test_an_engines_own_runner_is_measured_and_chunks_do_not_matter(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    config = EngineConfig(model_path=tmp_path, num_blocks=32, dtype="float32")
    engine = build_engine(config, lambda fields: BlockKeys(layout_fingerprint(fields)))
    runner = engine.runner
    assert isinstance(runner, SliceRunner)
    token_ids = [(index * 37) % 96 for index in range(150)]

    small, large = (
        compare_on_texts(runner, runner, {"t": token_ids}, Window(128, chunk, 16))["t"]
        for chunk in (16, 128)
    )

    assert small.reference_perplexity == pytest.approx(large.reference_perplexity, rel=1e-5)
    assert small.mean_kl < 1e-9
    engine.close()


def test_the_fixed_texts_are_six_thousand_tokens_and_more(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))

    lengths = [len(tokenizer.encode(text).ids) for text in read_texts().values()]

    assert len(lengths) == 2
    assert min(lengths) > 2500
    assert sum(lengths) >= 6000
