from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import Field, ValidationError

from mesh.config import (
    SERVICES,
    Address,
    Addresses,
    ConfigError,
    ServiceConfig,
    describe,
    load,
    read,
)


class GatewayConfig(ServiceConfig):
    service: ClassVar[str] = "gateway"

    port: int = Field(8000, ge=0, le=65535, description="where to serve HTTP")
    tokenizer_addresses: Addresses = Field(default_factory=list, description="tokenizers")
    models: dict[str, str] = Field(default_factory=dict, description="folders by name")
    mode: Literal["fast", "safe"] = Field("safe", description="how")
    model: str | None = Field(None, description="the model")


class WorkerConfig(ServiceConfig):
    service: ClassVar[str] = "decode"

    model_path: Path = Field(description="folder of the model")
    kv_transfer_address: Address | None = Field(None, description="the machine's agent")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REDIS_URL", "OTEL_EXPORTER_OTLP_ENDPOINT", "PDMESH_TOPOLOGY", "PDMESH_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "topology.yaml"
    monkeypatch.setenv("PDMESH_TOPOLOGY", str(path))
    return path


def problems_of(config_class: type[ServiceConfig]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(config_class)
    return caught.value.problems


def test_defaults_need_no_settings_at_all() -> None:
    config = read(GatewayConfig)

    assert config.listen == "127.0.0.1:0"
    assert config.worker_id == "gateway-0"
    assert config.redis_url == "redis://127.0.0.1:6379/0"
    assert config.log_level == "INFO"
    assert config.otlp_endpoint is None
    assert config.drain_timeout_s == 30
    assert config.parent_pid is None


def test_environment_beats_section_beats_top_level_beats_default(
    topology: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology.write_text(
        "log_level: warning\n"
        "drain_timeout_s: 5\n"
        "redis_url: redis://top:1/0\n"
        "gateway:\n"
        "  drain_timeout_s: 6\n"
        "  redis_url: redis://section:1/0\n"
    )
    monkeypatch.setenv("PDMESH_REDIS_URL", "redis://environment:1/0")

    config = read(GatewayConfig)

    assert config.log_level == "WARNING"
    assert config.drain_timeout_s == 6
    assert config.redis_url == "redis://environment:1/0"
    assert config.port == 8000


def test_values_are_read_from_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_PORT", "9000")
    monkeypatch.setenv("PDMESH_TOKENIZER_ADDRESSES", "127.0.0.1:1, [::1]:2,host:3")
    monkeypatch.setenv("PDMESH_MODELS", '{"a": "/models/a"}')
    monkeypatch.setenv("PDMESH_WORKER_ID", "gateway-7")
    monkeypatch.setenv("PDMESH_MODEL", "m")

    config = read(GatewayConfig)

    assert config.port == 9000
    assert config.tokenizer_addresses == ["127.0.0.1:1", "[::1]:2", "host:3"]
    assert config.models == {"a": "/models/a"}
    assert config.worker_id == "gateway-7"
    assert config.model == "m"


@pytest.mark.parametrize(
    ("variable", "field", "value"),
    [
        ("REDIS_URL", "redis_url", "redis://elsewhere:1/0"),
        ("PDMESH_REDIS_URL", "redis_url", "rediss://elsewhere:1/0"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "otlp_endpoint", "http://collector:4317"),
        ("PDMESH_OTLP_ENDPOINT", "otlp_endpoint", "http://collector:4317"),
    ],
)
def test_well_known_variables_are_read_too(
    monkeypatch: pytest.MonkeyPatch, variable: str, field: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)

    assert getattr(read(GatewayConfig), field) == value


def test_our_own_variable_comes_before_the_well_known_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://general:1/0")
    monkeypatch.setenv("PDMESH_REDIS_URL", "redis://own:1/0")

    assert read(GatewayConfig).redis_url == "redis://own:1/0"


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    monkeypatch.setenv("PDMESH_PORT", "")

    config = read(GatewayConfig)

    assert config.otlp_endpoint is None
    assert config.port == 8000


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis://h:six/0", "Port could not be cast"),
        ("redis://h:99999/0", "Port out of range"),
        ("redis://h:6379/cache", "no database: 'cache'"),
        ("rediss://h/1/2", "no database: '1/2'"),
    ],
)
def test_a_redis_that_cannot_be_meant_is_a_problem(
    url: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", url)

    [found] = problems_of(GatewayConfig)

    assert found.startswith(f"REDIS_URL: {problem}")


@pytest.mark.parametrize(
    "url", ["redis://h", "redis://h/", "redis://u:p@[::1]:1/3?protocol=3", "unix:///run/redis.sock"]
)
def test_redis_urls_of_one_server(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", url)

    assert read(GatewayConfig).redis_url == url


def test_all_problems_are_reported_at_once(topology: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology.write_text(
        "redis_ulr: redis://x\n"
        "redis_url: ftp://user:secret@x\n"
        "tokenizer_addresses: ['a:1', b]\n"
        "gateway:\n"
        "  prot: 3\n"
        "  mode: quick\n"
    )
    monkeypatch.setenv("PDMESH_PORT", "eighty")
    monkeypatch.setenv("PDMESH_MODELS", "{not json")
    monkeypatch.setenv("PDMESH_LOG_LEVL", "INFO")
    monkeypatch.setenv("PDMESH_LISTEN", "nowhere")

    problems = problems_of(GatewayConfig)

    expected = [
        "unknown variable PDMESH_LOG_LEVL; did you mean PDMESH_LOG_LEVEL?",
        "unknown key 'redis_ulr'; did you mean redis_url?",
        "unknown setting gateway.prot; did you mean port?",
        "PDMESH_LISTEN: should be host:port (got 'nowhere')",
        "redis_url: should begin with redis://",
        "PDMESH_PORT: Input should be a valid integer",
        "tokenizer_addresses[1]: should be host:port (got 'b')",
        "PDMESH_MODELS: Input should be a valid dictionary (got '{not json')",
        "mode: Input should be 'fast' or 'safe' (got 'quick')",
    ]
    assert len(problems) == len(expected)
    for problem, part in zip(problems, expected, strict=True):
        assert part in problem
    assert all(str(topology) in problems[index] for index in (1, 2, 4, 6, 8))
    assert "secret" not in "".join(problems)


@pytest.mark.parametrize("value", ["inf", "nan", "1e999"])
def test_times_are_finite(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PDMESH_DRAIN_TIMEOUT_S", value)

    [problem] = problems_of(GatewayConfig)

    assert "PDMESH_DRAIN_TIMEOUT_S: Input should be a finite number" in problem


def test_a_missing_setting_is_named_with_its_purpose() -> None:
    assert problems_of(WorkerConfig) == ["PDMESH_MODEL_PATH is missing: folder of the model"]


def test_load_prints_the_problems_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDMESH_PROT", "1")

    with pytest.raises(SystemExit) as caught:
        load(GatewayConfig)

    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "gateway: the settings have 1 problem(s)",
        "  - unknown variable PDMESH_PROT; did you mean PDMESH_PORT?",
    ]


def test_shared_keys_are_no_problem_for_services_without_them(
    topology: Path,
) -> None:
    topology.write_text(
        "scheduler_addresses: ['127.0.0.1:1']\n"
        "kv_transfer_address: '127.0.0.1:2'\n"
        "scheduler: {anything: 1}\n"
        "gateway:\n"
    )

    assert read(GatewayConfig).tokenizer_addresses == []


def test_a_section_of_every_service_may_stand_in_the_file(topology: Path) -> None:
    topology.write_text("".join(f"{name}: {{}}\n" for name in SERVICES))

    assert read(GatewayConfig) == read(GatewayConfig)


def test_a_services_own_setting_at_the_top_level_is_refused(topology: Path) -> None:
    topology.write_text("port: 1\n")

    assert "unknown key 'port'" in problems_of(GatewayConfig)[0]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [", "not valid YAML"),
        ("- a\n- b\n", "should map names to settings"),
        ("1: 2\n", "should map names to settings"),
        ("gateway: 5\n", "gateway should hold settings"),
        ("gateway: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ],
)
def test_a_broken_topology_file_is_a_problem(topology: Path, text: str, part: str) -> None:
    topology.write_text(text)

    assert part in problems_of(GatewayConfig)[0]


def test_a_missing_topology_file_is_a_problem(topology: Path) -> None:
    assert "cannot be read" in problems_of(GatewayConfig)[0]


def test_an_empty_topology_file_says_nothing(topology: Path) -> None:
    topology.write_text("# later\n")

    assert read(GatewayConfig).port == 8000


def test_problems_of_the_file_do_not_hide_those_of_the_environment(
    topology: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology.write_text("a: [")
    monkeypatch.setenv("PDMESH_PORT", "x")

    assert len(problems_of(GatewayConfig)) == 2


def test_names_of_the_command_line_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_HOME", "/tmp/home")

    assert read(GatewayConfig).port == 8000


def test_settings_do_not_change() -> None:
    config = read(GatewayConfig)

    with pytest.raises(ValidationError):
        config.port = 1


@pytest.mark.parametrize(
    "worker_id", ["a b", "a@b", "ü", "x" * 65], ids=["space", "at", "umlaut", "long"]
)
def test_worker_ids_are_safe_in_keys_and_labels(
    monkeypatch: pytest.MonkeyPatch, worker_id: str
) -> None:
    monkeypatch.setenv("PDMESH_WORKER_ID", worker_id)

    assert problems_of(GatewayConfig)[0].startswith("PDMESH_WORKER_ID: ")


def test_describe_yields_a_row_for_each_setting() -> None:
    rows = {row.name: row for row in describe(WorkerConfig)}

    assert list(rows)[:2] == ["listen", "worker_id"]
    assert rows["worker_id"].default == "decode-0"
    assert rows["redis_url"].variables == ("PDMESH_REDIS_URL", "REDIS_URL")
    assert rows["model_path"].default is None
    assert rows["model_path"].type_name == "Path"
    assert rows["kv_transfer_address"].type_name == "str"
    assert rows["kv_transfer_address"].default == ""
    assert rows["drain_timeout_s"].default == "30.0"
    assert all(row.description for row in rows.values())


def test_describe_spells_types_as_a_reader_would() -> None:
    rows = {row.name: row.type_name for row in describe(GatewayConfig)}

    assert rows["tokenizer_addresses"] == "list[str]"
    assert rows["models"] == "dict[str, str]"
    assert rows["mode"] == "fast or safe"
    assert rows["model"] == "str"
