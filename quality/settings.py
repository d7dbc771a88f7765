"""Engine settings by name, so that a new number format needs nothing new here."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from engine.config import EngineConfig, ModelConfig
from engine.models.registry import Choice, choose

# What does not change any number, or is a place.
_NOT_SETTINGS = frozenset({"model_path", "segment_path", "packed_weights_dir"})


class SettingsError(Exception):
    """A setting is unknown or cannot have this value."""


def engine_config(model_path: Path, assignments: Sequence[str]) -> EngineConfig:
    """Read NAME=VALUE pairs into a config.

    Raises:
        SettingsError: with the name, and the nearest one that exists.
    """
    names = {field.name for field in fields(EngineConfig)} - _NOT_SETTINGS
    values: dict[str, Any] = {"model_path": model_path}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator:
            raise SettingsError(f"{assignment!r}: expected NAME=VALUE")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SettingsError(f"the engine has no setting {name!r}{hint}")
        values[name] = value
    try:
        return TypeAdapter(EngineConfig).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise SettingsError(f"{first['loc'][0]}: {first['msg']}") from None


def settled(config: EngineConfig) -> Choice:
    """What the settings that say "auto" come to for this model on this machine."""
    model = ModelConfig.from_folder(config.model_path)
    return choose(config, model, config.max_model_len or model.max_position_embeddings)


def describe(config: EngineConfig) -> Mapping[str, Any]:
    """Every setting that can change what is computed, and what it came to, as JSON."""
    settings = {name: value for name, value in asdict(config).items() if name not in _NOT_SETTINGS}
    return {**settings, "settled": vars(settled(config))}
