"""`pdmesh calc`: the arithmetic of the articles, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mesh.cli.calc import calc
from mesh.kv_size import (
    HeadShape,
    KvSize,
    LatentShape,
    ShapeError,
    cost_per_million_tokens,
    shape_from_config,
)

KIB, GIB = 1 << 10, 1 << 30


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(calc)
    return CliRunner().invoke(app, arguments)


def answer(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    parsed: dict[str, Any] = json.loads(result.output)
    return parsed


def test_llama_3_70b_takes_320_kib_a_token() -> None:
    found = answer("--layers", "80", "--heads", "64", "--kv-heads", "8", "--head-dim", "128")

    assert found["bytes_per_token"] == 320 * KIB
    assert found["attention"] == "GQA"


def test_32_layers_of_8_heads_of_128_take_128_kib_a_token() -> None:
    found = answer("--layers", "32", "--kv-heads", "8", "--head-dim", "128")

    assert found["bytes_per_token"] == 128 * KIB
    # Which of the two it is, only the number of heads that ask would tell.
    assert found["attention"] == "MHA or GQA"


def test_13b_with_2048_tokens_and_batch_8_takes_twelve_and_a_half_gib() -> None:
    found = answer(
        *("--layers", "40", "--heads", "40", "--head-dim", "128"),
        *("--kv-dtype", "float16", "--context", "2048", "--batch", "8"),
    )

    assert found["attention"] == "MHA"
    assert found["contexts"][0]["batch_bytes"] == 12.5 * GIB


def test_one_kv_head_is_mqa() -> None:
    found = answer("--layers", "2", "--heads", "8", "--kv-heads", "1", "--head-dim", "64")

    assert found["attention"] == "MQA"
    assert found["bytes_per_token"] == 2 * 2 * 64 * 2


def test_mla_keeps_one_compressed_vector_and_one_rotary_key() -> None:
    found = answer("--layers", "61", "--kv-lora-rank", "512", "--qk-rope-head-dim", "64")

    assert found["attention"] == "MLA"
    assert found["bytes_per_token"] == 61 * (512 + 64) * 2


def test_concurrency_falls_with_context_and_counts_whole_blocks() -> None:
    size = KvSize(HeadShape(num_layers=1, num_kv_heads=1, head_dim=1), bits=8, block_size=16)
    memory_bytes = 10 * size.bytes_per_block

    assert size.bytes_per_block == 32
    assert [size.concurrency(n, memory_bytes) for n in (1, 16, 17, 80, 160, 161)] == [
        *(10, 10, 5, 2, 1, 0)
    ]


def test_eight_bit_doubles_the_blocks() -> None:
    shape = HeadShape(num_layers=30, num_kv_heads=3, head_dim=64)

    full, half = KvSize(shape, 16), KvSize(shape, 8)

    assert half.num_blocks_in(GIB) // full.num_blocks_in(GIB) == 2


def test_transfer_time_is_bytes_over_bandwidth() -> None:
    found = answer(
        *("--layers", "80", "--kv-heads", "8", "--head-dim", "128"),
        *("--context", "2048", "--bandwidth-gb-s", "25"),
    )

    assert found["contexts"][0]["transfer_ms"] == pytest.approx(2048 * 320 * KIB / 25e9 * 1e3)


def test_cost_is_price_over_tokens() -> None:
    assert cost_per_million_tokens(3.6, 1000) == pytest.approx(1.0)
    assert answer(
        *("--layers", "1", "--kv-heads", "1", "--head-dim", "1"),
        *("--price-per-hour", "3.6", "--tokens-per-s", "1000"),
    )["cost_per_million_tokens"] == pytest.approx(1.0)


def test_shape_comes_from_a_model_folder(smollm2_path: Path) -> None:
    shape = shape_from_config(smollm2_path)

    assert shape == HeadShape(num_layers=30, num_kv_heads=3, head_dim=64, num_heads=9)
    assert answer(str(smollm2_path))["bytes_per_token"] == 30 * 2 * 3 * 64 * 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32},
            HeadShape(2, 4, 8, 4),
        ),
        (
            {
                **{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32},
                **{"num_key_value_heads": None, "head_dim": 16},
            },
            HeadShape(2, 4, 16, 4),
        ),
        (
            {"num_hidden_layers": 3, "kv_lora_rank": 16, "qk_rope_head_dim": 4},
            LatentShape(3, 16, 4),
        ),
        (
            {
                "text_config": {
                    **{"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8},
                    "num_key_value_heads": 1,
                }
            },
            HeadShape(1, 1, 4, 2),
        ),
    ],
)
def test_configs_of_all_kinds_are_read(tmp_path: Path, config: Any, expected: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert shape_from_config(tmp_path) == expected


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"num_hidden_layers": "30"}'])
def test_a_config_without_a_shape_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ShapeError, match=r"config\.json"):
        shape_from_config(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--layers"),
        (("--layers", "2", "--head-dim", "8"), "--kv-heads"),
        (("--layers", "2", "--heads", "3", "--kv-heads", "2", "--head-dim", "8"), "multiple"),
        (("--layers", "2", "--kv-lora-rank", "8"), "--qk-rope-head-dim"),
        (
            (
                *("--layers", "2", "--kv-lora-rank", "8", "--qk-rope-head-dim", "8"),
                *("--kv-heads", "2"),
            ),
            "--kv-heads",
        ),
        (("--layers", "2", "--kv-heads", "2", "--head-dim", "8", "--kv-dtype", "f"), "--kv-dtype"),
        (
            ("--layers", "2", "--kv-heads", "2", "--head-dim", "8", "--price-per-hour", "1"),
            "--tokens-per-s",
        ),
    ],
)
def test_a_question_that_says_too_little_is_refused_by_name(
    arguments: tuple[str, ...], named: str
) -> None:
    result = run(*arguments)

    assert result.exit_code == 2
    assert named in result.output


def test_the_table_names_bytes_per_token() -> None:
    result = run(
        *("--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--memory-gib", "40"),
        *("--bandwidth-gb-s", "25", "--context", "8192"),
    )

    assert result.exit_code == 0
    assert "320 KiB a token" in result.output
    assert "16" in result.output
