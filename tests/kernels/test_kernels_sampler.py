"""Sampling over the vocabulary, against a plain numpy sampler with the same generator."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.kernels.library import SAMPLING_DTYPE, Library
from engine.kernels.native_llama import NativeLlama
from tests.kernels.kernel_models import SmallConfig, make_runner

Array = npt.NDArray[Any]

VOCAB_SIZE = 3001
MASK = (1 << 64) - 1


@pytest.fixture(scope="module", params=["amx", "avx512", "avx2", "portable"])
def model(library: Library, request: pytest.FixtureRequest) -> Iterator[NativeLlama]:
    if library.level(request.param) is None:
        pytest.skip(f"this machine has no {request.param}")
    config = SmallConfig(vocab_size=VOCAB_SIZE, num_layers=1)
    with make_runner(library, config=config, level=request.param, num_threads=2).model as model:
        yield model


def uniform(seed: int, position: int) -> float:
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    x ^= x >> 31
    return (x >> 11) * 2.0**-53


def kept_tokens(logits: Array, params: Any) -> Array:
    """Token ids that top-k, then top-p, then min-p leave, and their float64 weights."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    wide = logits.astype(np.float64)
    weights = np.exp((wide - wide.max()) / params["temperature"])
    if params["top_k"]:
        order = order[: params["top_k"]]
    if params["top_p"] < 1:
        cumulative = np.cumsum(weights[order])
        order = order[: np.searchsorted(cumulative, params["top_p"] * cumulative[-1]) + 1]
    return np.sort(order[weights[order] >= params["min_p"]])


def reference_token(logits: Array, params: Any) -> int:
    kept = kept_tokens(logits, params)
    wide = logits.astype(np.float64)
    cumulative = np.cumsum(np.exp((wide[kept] - wide.max()) / params["temperature"]))
    number = uniform(int(params["seed"]), int(params["position"]))
    return int(kept[np.searchsorted(cumulative, number * cumulative[-1], side="right")])


def make_params(num_rows: int, **fields: Any) -> Array:
    params = np.zeros(num_rows, dtype=SAMPLING_DTYPE)
    params["temperature"] = params["top_p"] = 1
    params["position"] = np.arange(num_rows)
    for name, value in fields.items():
        params[name] = value
    return params


def make_logits(num_rows: int, spread: float = 4.0, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((num_rows, VOCAB_SIZE)) * spread).astype(np.float32)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 2999},
        {"top_p": 0.0},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
    ],
    ids=str,
)
def test_tokens_are_those_of_a_plain_sampler(model: NativeLlama, fields: dict[str, Any]) -> None:
    logits = make_logits(120)
    params = make_params(120, seed=-(2**63), **fields)

    token_ids = model.sample(logits, params)

    expected = [reference_token(row, param) for row, param in zip(logits, params, strict=True)]
    assert token_ids.tolist() == expected


def test_flat_distributions_keep_their_tail(model: NativeLlama) -> None:
    logits = make_logits(60, spread=0.01)
    params = make_params(60, top_p=0.9, seed=3)

    token_ids = model.sample(logits, params)

    expected = [reference_token(row, param) for row, param in zip(logits, params, strict=True)]
    assert token_ids.tolist() == expected


def test_draws_follow_the_distribution(model: NativeLlama) -> None:
    logits = np.full((4000, VOCAB_SIZE), -np.inf, dtype=np.float32)
    logits[:, [5, 9, 2000]] = np.log([0.5, 0.3, 0.2])
    params = make_params(4000, seed=11)

    token_ids = model.sample(logits, params)

    shares = [(token_ids == token_id).mean() for token_id in (5, 9, 2000)]
    assert np.abs(np.array(shares) - [0.5, 0.3, 0.2]).max() < 0.03


def test_greedy_takes_the_first_of_equal_logits(model: NativeLlama) -> None:
    logits = np.zeros((1, VOCAB_SIZE), dtype=np.float32)
    logits[0, [17, 900, 2900]] = 3.0

    assert model.sample(logits, make_params(1, temperature=0)).tolist() == [17]


def test_top_k_among_equal_logits_keeps_the_first(model: NativeLlama) -> None:
    logits = np.zeros((400, VOCAB_SIZE), dtype=np.float32)

    token_ids = model.sample(logits, make_params(400, top_k=3, seed=1))

    assert set(token_ids.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 16, VOCAB_SIZE - 1])
def test_a_row_that_is_not_finite_has_no_token(
    model: NativeLlama, bad: float, temperature: float, place: int
) -> None:
    logits = make_logits(3)
    logits[1, place] = bad

    token_ids = model.sample(logits, make_params(3, temperature=temperature))

    assert token_ids[1] == -1
    assert (token_ids[[0, 2]] >= 0).all()


def test_a_row_with_nothing_left_has_no_token(model: NativeLlama) -> None:
    logits = np.full((1, VOCAB_SIZE), -np.inf, dtype=np.float32)

    assert model.sample(logits, make_params(1)).tolist() == [-1]


def test_a_row_draws_the_same_token_in_any_company(model: NativeLlama) -> None:
    logits = make_logits(50)
    params = make_params(50, seed=5, top_p=0.95)

    together = model.sample(logits, params)

    alone = [int(model.sample(logits[i : i + 1], params[i : i + 1])[0]) for i in range(50)]
    assert together.tolist() == alone
