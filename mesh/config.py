"""Settings of a service: environment over topology file over defaults."""

import difflib
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from mesh.redis_urls import parse_several

ENV_PREFIX = "PDMESH_"
SERVICES = ("gateway", "tokenizer", "scheduler", "prefill", "decode", "kv_transfer")

# Settings that a topology file may give at its top level, for every service that has them.
SHARED_NAMES = (
    "redis_url",
    "log_level",
    "otlp_endpoint",
    "vllm_metrics",
    "drain_timeout_s",
    "tokenizer_addresses",
    "scheduler_addresses",
    "kv_transfer_address",
)

# Variables that other programs read too, by the setting that they stand for here.
FOREIGN_VARIABLES = {
    "redis_url": "REDIS_URL",
    "otlp_endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT",
}

# Names that the command line reads, or that say where the settings are.
_NOT_SETTINGS = ("PDMESH_HOME", "PDMESH_TOPOLOGY")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def _check_address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("should be host:port")
    return value


def _check_redis_url(value: str) -> str:
    """One server, or several by `redis+sentinel://` and `redis+cluster://`."""
    if parse_several(value) is not None:
        return value
    parts = urlsplit(value)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError(
            "should begin with redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"
        )
    if parts.scheme != "unix":
        _ = parts.port  # raises where it is none
        # redis-py takes database 0 for what it cannot read, and 12 for /1/2.
        if not re.fullmatch(r"/?|/\d+", parts.path, re.ASCII):
            raise ValueError(f"no database: {parts.path[1:]!r}")
    return value


def _check_log_level(value: str) -> str:
    if value.upper() not in _LOG_LEVELS:
        raise ValueError(f"should be one of {', '.join(_LOG_LEVELS)}")
    return value.upper()


def split_commas(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


Address = Annotated[str, AfterValidator(_check_address)]
# In the environment the addresses are separated by commas.
Addresses = Annotated[list[Address], NoDecode, BeforeValidator(split_commas)]


class _EnvSource(EnvSettingsSource):
    """Leaves a value that is not JSON to validation, which reports it with the others."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value


class ServiceConfig(BaseSettings):
    """What every service can be told; each service adds its own fields."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        # Errors name fields, not the variables a field may come from.
        loc_by_alias=False,
        env_ignore_empty=True,
        # `model` and `model_path` are settings here.
        protected_namespaces=(),
        # Every wait has a bound.
        allow_inf_nan=False,
    )

    # The service's section in the topology file; each subclass sets it.
    service: ClassVar[str]

    listen: Address = Field(
        "127.0.0.1:0", description="where to serve gRPC; port 0 picks a free one"
    )
    worker_id: str = Field(
        "",
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="the process's name in the mesh; by default <service>-0",
    )
    redis_url: Annotated[str, AfterValidator(_check_redis_url)] = Field(
        "redis://127.0.0.1:6379/0",
        validation_alias=AliasChoices("PDMESH_REDIS_URL", FOREIGN_VARIABLES["redis_url"]),
        description="where the mesh keeps who is alive and who holds what",
    )
    log_level: Annotated[str, AfterValidator(_check_log_level)] = Field(
        "INFO", description="DEBUG, INFO, WARNING or ERROR"
    )
    otlp_endpoint: str | None = Field(
        None,
        validation_alias=AliasChoices("PDMESH_OTLP_ENDPOINT", FOREIGN_VARIABLES["otlp_endpoint"]),
        description="OpenTelemetry collector (gRPC) for traces; without it tracing is off",
    )
    metrics_listen: Address | None = Field(
        None, description="where GET /metrics is answered; without it nowhere"
    )
    vllm_metrics: bool = Field(
        False, description="report metrics under vLLM's names too (vllm:num_requests_running …)"
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, description="how long running requests may take to finish on SIGTERM"
    )
    parent_pid: int | None = Field(
        None, ge=1, description="end when this process, which must be the parent, ends"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_the_worker(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {"worker_id": f"{cls.service}-0", **values}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load` passes the topology file's values as arguments: the environment wins.
        return _EnvSource(settings_cls), init_settings


Config = TypeVar("Config", bound=ServiceConfig)


class ConfigError(Exception):
    """Everything that is wrong with the settings, one sentence each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class _Location(BaseSettings):
    """Where the topology file is."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True)

    topology: Path | None = None


def load(config_class: type[Config]) -> Config:
    """The settings of this process; what is wrong goes to stderr, with exit status 2."""
    try:
        return read(config_class)
    except ConfigError as error:
        lines = [f"{config_class.service}: the settings have {len(error.problems)} problem(s)"]
        lines += [f"  - {problem}" for problem in error.problems]
        print("\n".join(lines), file=sys.stderr)
        raise SystemExit(2) from None


def read(config_class: type[Config]) -> Config:
    """Like `load`, but raises ConfigError with all problems."""
    path = _Location().topology
    problems = _unknown_variables(config_class)
    values: dict[str, Any] = {}
    try:
        values = _topology_values(config_class, path, problems)
        config = config_class(**values)
    except ValidationError as error:
        problems += [_explain(config_class, details, path, values) for details in error.errors()]
    if problems:
        raise ConfigError(problems)
    return config


def describe(config_class: type[ServiceConfig]) -> Iterator["Setting"]:
    """Every setting of a service, for its table in the documentation."""
    for name, field in config_class.model_fields.items():
        yield Setting(
            name=name,
            variables=_variables(name, field),
            type_name=_type_name(field.annotation),
            default=_default(config_class, name, field),
            description=field.description or "",
        )


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings."""

    name: str
    # In the environment; the first one counts.
    variables: tuple[str, ...]
    type_name: str
    # None: it must be given.
    default: str | None
    description: str


def _topology_values(
    config_class: type[ServiceConfig], path: Path | None, problems: list[str]
) -> dict[str, Any]:
    """What the topology file says to this service."""
    if path is None:
        return {}
    topology = _read_yaml(path, problems)
    fields = config_class.model_fields
    values: dict[str, Any] = {}
    for key, value in topology.items():
        if key in SERVICES:
            continue
        if key not in SHARED_NAMES:
            problems.append(f"{path}: unknown key {key!r}{_suggest(key, SHARED_NAMES + SERVICES)}")
        elif key in fields:
            values[key] = value
    section = topology.get(config_class.service)
    if section is None:
        return values
    if not isinstance(section, dict):
        problems.append(f"{path}: {config_class.service} should hold settings")
        return values
    for key, value in section.items():
        if key not in fields:
            where = f"{config_class.service}.{key}"
            problems.append(f"{path}: unknown setting {where}{_suggest(key, fields)}")
        else:
            values[key] = value
    return values


def _read_yaml(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        topology = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return {}
    except yaml.YAMLError as error:
        problems.append(f"{path}: not valid YAML: {' '.join(str(error).split())}")
        return {}
    if topology is None:
        return {}
    if not isinstance(topology, dict) or not all(isinstance(key, str) for key in topology):
        problems.append(f"{path}: should map names to settings")
        return {}
    return topology


def _unknown_variables(config_class: type[ServiceConfig]) -> list[str]:
    known = {
        variable
        for name, field in config_class.model_fields.items()
        for variable in _variables(name, field)
    }
    present = [name.upper() for name in EnvSettingsSource(config_class).env_vars]
    return [
        f"unknown variable {name}{_suggest(name, known)}"
        for name in sorted(present)
        if name.startswith(ENV_PREFIX) and name not in known and name not in _NOT_SETTINGS
    ]


def _explain(
    config_class: type[ServiceConfig],
    details: ErrorDetails,
    path: Path | None,
    topology_values: Mapping[str, Any],
) -> str:
    """One problem: where the value came from, what it should be, what it is."""
    name = str(details["loc"][0]) if details["loc"] else ""
    message = details["msg"].removeprefix("Value error, ")
    if name not in config_class.model_fields:
        return message
    variables = _variables(name, config_class.model_fields[name])
    present = {one.upper() for one in EnvSettingsSource(config_class).env_vars}
    given = [variable for variable in variables if variable in present]
    if details["type"] == "missing":
        return f"{variables[0]} is missing: {config_class.model_fields[name].description}"
    where = given[0] if given else f"{path}: {name}" if name in topology_values else variables[0]
    inner = "".join(f"[{part!r}]" for part in details["loc"][1:])
    # A URL may hold a password.
    got = re.sub(r"//[^@/]*@", "//***@", repr(details["input"]))
    return f"{where}{inner}: {message} (got {got})"


def _variables(name: str, field: FieldInfo) -> tuple[str, ...]:
    if isinstance(field.validation_alias, AliasChoices):
        return tuple(str(choice) for choice in field.validation_alias.choices)
    return (ENV_PREFIX + name.upper(),)


def _default(config_class: type[ServiceConfig], name: str, field: FieldInfo) -> str | None:
    if name == "worker_id":
        service = getattr(config_class, "service", "<service>")
        return f"{service}-0"
    if field.is_required():
        return None
    default = field.get_default(call_default_factory=True, validated_data={})
    return "" if default is None else str(default)


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        parts = [one for one in typing.get_args(annotation) if one is not types.NoneType]
        return " or ".join(_type_name(part) for part in parts)
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is typing.Literal:
        return " or ".join(str(argument) for argument in arguments)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_type_name(one) for one in arguments)}]"
    return str(getattr(annotation, "__name__", annotation))


def _suggest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
