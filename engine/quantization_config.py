"""How a checkpoint's matrices are quantized, by the `quantization_config` of its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Whose names and packing the tensors have: see engine/quantized_layouts.py.
LayoutName = Literal["pdmesh", "compressed-tensors", "gptq", "awq"]

_GROUP_SIZE = 32
PDMESH_FORMAT = 1


class UnsupportedQuantization(Exception):
    """A checkpoint that is quantized in a way which the engine cannot read."""


@dataclass(frozen=True)
class CheckpointQuantization:
    """What the matrices of a quantized checkpoint are."""

    layout: LayoutName
    weights: Literal["int8", "int4"]
    # Inputs that share a scale; None: all inputs of a row.
    group_size: int | None
    # GPTQ's first format stores each zero point less one.
    zeros_less_one: bool = False


def parse_quantization(values: Mapping[str, Any]) -> CheckpointQuantization:
    """Read a `quantization_config`; raises UnsupportedQuantization with what is not supported."""
    method = values.get("quant_method")
    match method:
        case "gptq":
            return _gptq(values)
        case "awq":
            return _awq(values)
        case "compressed-tensors":
            return _compressed_tensors(values)
        case "pdmesh":
            _require(values, "format", PDMESH_FORMAT)
            _require(values, "bits", 4)
            _require(values, "group_size", _GROUP_SIZE)
            return CheckpointQuantization("pdmesh", "int4", _GROUP_SIZE)
    raise UnsupportedQuantization(
        f"quant_method {method!r} is not supported; supported: gptq, awq, compressed-tensors"
        " (int8 per channel) and what `pdmesh model quantize` writes"
    )


def config_of(weights: Literal["int8", "int4"]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint that the engine writes itself."""
    if weights == "int4":
        return {
            "quant_method": "pdmesh",
            "format": PDMESH_FORMAT,
            "bits": 4,
            "group_size": _GROUP_SIZE,
        }
    scheme = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    }
    group = {
        "targets": ["Linear", "Embedding"],
        "weights": scheme,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [],
    }


def _gptq(values: Mapping[str, Any]) -> CheckpointQuantization:
    _require(values, "bits", 4)
    layout = values.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise UnsupportedQuantization(f"checkpoint_format {layout!r}: only gptq and gptq_v2 are")
    if values.get("dynamic"):
        raise UnsupportedQuantization("dynamic: every matrix must have the same bits and groups")
    # With desc_act the tensors say themselves which inputs share a group.
    return CheckpointQuantization("gptq", "int4", _group_size(values), layout == "gptq")


def _awq(values: Mapping[str, Any]) -> CheckpointQuantization:
    _require(values, "bits", 4)
    _require(values, "version", "gemm")
    _require(values, "zero_point", True)
    return CheckpointQuantization("awq", "int4", _group_size(values))


def _compressed_tensors(values: Mapping[str, Any]) -> CheckpointQuantization:
    _require(values, "format", "int-quantized")
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise UnsupportedQuantization("config_groups: expected one group for all matrices")
    [group] = groups.values()
    scheme = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(scheme, dict):
        raise UnsupportedQuantization("config_groups: the group has no weights")
    for key, expected in (
        ("num_bits", 8),
        ("type", "int"),
        ("symmetric", True),
        ("strategy", "channel"),
    ):
        _require(scheme, key, expected)
    activations = group.get("input_activations")
    if activations is not None and activations.get("dynamic") is not True:
        raise UnsupportedQuantization("input_activations: only dynamic scales are supported")
    return CheckpointQuantization("compressed-tensors", "int8", None)


def _group_size(values: Mapping[str, Any]) -> int | None:
    # Both spellings are in use.
    size = values.get("group_size", values.get("q_group_size"))
    if size == -1:
        return None
    if type(size) is not int or size <= 0 or size % _GROUP_SIZE:
        raise UnsupportedQuantization(
            f"group_size {size!r} is not supported; supported: multiples of {_GROUP_SIZE}, and -1"
        )
    return size


def _require(values: Mapping[str, Any], key: str, expected: object) -> None:
    value = values.get(key)
    if isinstance(value, str) and isinstance(expected, str):
        value = value.lower()
    if type(value) is not type(expected) or value != expected:
        raise UnsupportedQuantization(f"{key} {value!r} is not supported; supported: {expected!r}")
