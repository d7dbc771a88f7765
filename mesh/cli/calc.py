"""`pdmesh calc`: what a KV cache takes, moves and costs, before anything is bought or started."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from mesh.cli.options import fail, output_console
from mesh.kv_size import (
    DTYPE_BITS,
    HeadShape,
    KvShape,
    KvSize,
    LatentShape,
    ShapeError,
    cost_per_million_tokens,
    shape_from_config,
)

GIB = 1 << 30
GB = 1e9
DEFAULT_CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def calc(
    model: Annotated[
        Path | None, typer.Argument(help="A model folder or config.json; or give the shape.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="KV heads: 1 is MQA, as many as heads is MHA.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Size of a head.")] = None,
    kv_lora_rank: Annotated[
        int | None, typer.Option(min=1, help="MLA: size of the compressed vector.")
    ] = None,
    qk_rope_head_dim: Annotated[
        int | None, typer.Option(min=1, help="MLA: size of the rotary key.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPE_BITS)}.")] = "bfloat16",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 16,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a sequence; may be repeated.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences whose total is shown.")] = 1,
    memory_gib: Annotated[
        float | None, typer.Option(min=0, help="Memory for KV blocks, for the concurrency.")
    ] = None,
    bandwidth_gb_s: Annotated[
        float | None, typer.Option(min=0, help="GB/s of the link, for the transfer time.")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of the machine, with --tokens-per-s.")
    ] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option(min=0, help="Tokens that the price buys each second.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Size a KV cache: bytes per token, blocks, concurrency, transfer time, cost."""
    if kv_dtype not in DTYPE_BITS:
        raise fail(f"--kv-dtype is {kv_dtype!r}, expected one of {', '.join(DTYPE_BITS)}", 2)
    if (price_per_hour is None) != (tokens_per_s is None):
        raise fail("--price-per-hour and --tokens-per-s need each other", 2)
    for name, value in (("bandwidth-gb-s", bandwidth_gb_s), ("tokens-per-s", tokens_per_s)):
        if value == 0:
            raise fail(f"--{name} is 0, expected more", 2)
    flags = {
        "layers": layers,
        "heads": heads,
        "kv-heads": kv_heads,
        "head-dim": head_dim,
        "kv-lora-rank": kv_lora_rank,
        "qk-rope-head-dim": qk_rope_head_dim,
    }
    try:
        shape = _shape(model, flags)
    except ShapeError as error:
        raise fail(str(error), 2) from error
    question = Question(
        KvSize(shape, DTYPE_BITS[kv_dtype], block_size),
        kv_dtype,
        tuple(context or DEFAULT_CONTEXTS),
        batch,
        None if memory_gib is None else memory_gib * GIB,
        None if bandwidth_gb_s is None else bandwidth_gb_s * GB,
        None
        if price_per_hour is None or tokens_per_s is None
        else cost_per_million_tokens(price_per_hour, tokens_per_s),
    )
    if as_json:
        typer.echo(json.dumps(describe(question), indent=2))
    else:
        _print(question)


@dataclass(frozen=True)
class Question:
    """What is asked about one cache."""

    size: KvSize
    kv_dtype: str
    contexts: tuple[int, ...]
    batch: int
    memory_bytes: float | None
    bytes_per_s: float | None
    cost_per_million_tokens: float | None


def describe(question: Question) -> dict[str, Any]:
    """The answer as JSON; bytes are exact."""
    size = question.size
    answer: dict[str, Any] = {
        "attention": size.shape.kind,
        "shape": asdict(size.shape),
        "kv_dtype": question.kv_dtype,
        "block_size": size.block_size,
        "bytes_per_token": _whole(size.bytes_per_token),
        "bytes_per_block": _whole(size.bytes_per_block),
        "contexts": [_context(question, num_tokens) for num_tokens in question.contexts],
    }
    if question.memory_bytes is not None:
        answer["num_blocks"] = size.num_blocks_in(question.memory_bytes)
    if question.cost_per_million_tokens is not None:
        answer["cost_per_million_tokens"] = question.cost_per_million_tokens
    return answer


def _context(question: Question, num_tokens: int) -> dict[str, Any]:
    size = question.size
    row: dict[str, Any] = {
        "num_tokens": num_tokens,
        "num_blocks": size.num_blocks(num_tokens),
        "batch": question.batch,
        "batch_bytes": _whole(size.bytes_per_token * num_tokens * question.batch),
    }
    if question.memory_bytes is not None:
        row["concurrency"] = size.concurrency(num_tokens, question.memory_bytes)
    if question.bytes_per_s is not None:
        row["transfer_ms"] = 1e3 * size.transfer_s(num_tokens, question.bytes_per_s)
    return row


def _shape(model: Path | None, flags: Mapping[str, int | None]) -> KvShape:
    given = {name: value for name, value in flags.items() if value is not None}
    if model is not None:
        if given:
            raise ShapeError(f"{model} has a shape; leave out {_flags(given)}")
        return shape_from_config(model)
    if "kv-lora-rank" in given or "qk-rope-head-dim" in given:
        names = ("layers", "kv-lora-rank", "qk-rope-head-dim")
        if extra := set(given) - {*names, "heads"}:
            raise ShapeError(f"MLA has no {_flags(extra)}")
        return LatentShape(*_required(given, names))
    given.setdefault("kv-heads", given.get("heads", 0))
    num_layers, num_kv_heads, size = _required(given, ("layers", "kv-heads", "head-dim"))
    shape = HeadShape(num_layers, num_kv_heads, size, given.get("heads"))
    if shape.num_heads is not None and shape.num_heads % shape.num_kv_heads:
        raise ShapeError(
            f"--heads {shape.num_heads} is no multiple of --kv-heads {shape.num_kv_heads}"
        )
    return shape


def _required(given: Mapping[str, int], names: tuple[str, ...]) -> list[int]:
    if missing := [name for name in names if not given.get(name)]:
        raise ShapeError(f"give a model folder, or {_flags(missing)}")
    return [given[name] for name in names]


def _flags(names: Any) -> str:
    return ", ".join(f"--{name}" for name in sorted(names))


def _print(question: Question) -> None:
    size, console = question.size, output_console()
    console.print(
        f"{size.shape.kind}, {question.kv_dtype}: {_bytes(size.bytes_per_token)} a token, "
        f"{_bytes(size.bytes_per_block)} a block of {size.block_size}",
        highlight=False,
    )
    table = Table("tokens", "blocks", f"KV of {question.batch}", box=None)
    rows = [_context(question, num_tokens) for num_tokens in question.contexts]
    if question.memory_bytes is not None:
        table.add_column(f"at once in {_bytes(question.memory_bytes)}")
    if question.bytes_per_s is not None:
        table.add_column(f"transfer at {question.bytes_per_s / GB:g} GB/s")
    for row in rows:
        cells = [f"{row['num_tokens']:,}", f"{row['num_blocks']:,}", _bytes(row["batch_bytes"])]
        if "concurrency" in row:
            cells.append(f"{row['concurrency']:,}")
        if "transfer_ms" in row:
            cells.append(f"{row['transfer_ms']:,.2f} ms")
        table.add_row(*cells)
    console.print(table)
    if question.cost_per_million_tokens is not None:
        console.print(f"{question.cost_per_million_tokens:,.4f} per million tokens")


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:,.5g} {unit}"
        value /= 1024
    return f"{value:,.5g} TiB"


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value
