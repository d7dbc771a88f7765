"""From the options of `pdmesh up` to the settings of its services."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mesh.cli.main import app
from mesh.config import read
from mesh.home import Home
from mesh.launch import LaunchOptions, plan_launch, write_topology
from mesh.server import MeshServer
from scheduler_svc.config import SchedulerConfig


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def healthy_port() -> Iterator[int]:
    """Where a web server says that it is well, as any gateway does."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server.server_port
        server.shutdown()
        serving.join()


def test_rules_file_goes_to_the_gateway_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = LaunchOptions("smol", tmp_path, rules_path=Path("rules.yaml"))

    launch = plan_launch(Home(tmp_path), options, {})

    assert launch.topology["gateway"]["rules_path"] == str(tmp_path / "rules.yaml")


def test_without_a_rules_file_the_gateway_gets_none(tmp_path: Path) -> None:
    launch = plan_launch(Home(tmp_path), LaunchOptions("smol", tmp_path), {})

    assert "rules_path" not in launch.topology["gateway"]


def test_up_refuses_a_rules_file_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "rules.yaml"

    result = CliRunner().invoke(app, ["up", "--home", str(tmp_path), "--rules", str(missing)])

    assert result.exit_code == 2
    assert "--rules" in result.output


@pytest.mark.parametrize("value", ["{", "'a", "a: b: c", "\x07"])
def test_up_explains_a_setting_that_is_no_yaml(tmp_path: Path, value: str) -> None:
    setting = f"gateway.rules_path={value}"

    result = CliRunner().invoke(
        app, ["up", "--home", str(tmp_path), "--model", str(tmp_path), "--set", setting]
    )

    assert result.exit_code == 1
    assert f"pdmesh: --set {setting}: not a YAML value" in result.output


def test_an_interrupted_up_leaves_no_mesh_starting_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as behind:
        monkeypatch.setattr("mesh.cli.up.subprocess.Popen", lambda *_, **__: behind)
        monkeypatch.setattr("mesh.cli.up._wait_until_ready", interrupted)

        CliRunner().invoke(app, ["up", "--home", str(tmp_path), "--detach"])

        status = behind.poll()
        behind.kill()
    assert status == -signal.SIGTERM


def test_the_longest_drain_of_all_services_is_waited_for(tmp_path: Path) -> None:
    def longest_drain_s(**settings: dict[str, object]) -> float:
        options = LaunchOptions("smol", tmp_path, settings=settings)
        return plan_launch(Home(tmp_path), options, {}).longest_drain_s

    assert longest_drain_s() == 10
    assert longest_drain_s(decode={"drain_timeout_s": 60}, gateway={"drain_timeout_s": 5}) == 60
    assert longest_drain_s(decode={"drain_timeout_s": None}) == 10


def test_services_that_may_fail_one_at_a_time_are_told_apart(tmp_path: Path) -> None:
    home = Home(tmp_path)
    options = LaunchOptions(
        "smol",
        tmp_path,
        port=9000,
        num_prefill=2,
        num_decode=3,
        num_gateways=2,
        num_tokenizers=2,
        num_schedulers=2,
        num_kv_transfer=2,
    )

    launch = plan_launch(home, options, {})

    specs = {spec.name: spec for spec in launch.specs}
    assert specs["gateway-0"].address == "127.0.0.1:9000"
    assert specs["gateway-1"].address == "127.0.0.1:9001"
    assert specs["gateway-1"].env["PDMESH_PORT"] == "9001"
    assert launch.grpc_address == specs["gateway-0"].env["PDMESH_INFERENCE_LISTEN"]
    for name in ("tokenizer", "scheduler"):
        assert launch.topology["gateway"][f"{name}_addresses"] == [
            specs[f"{name}-{index}"].address for index in range(2)
        ]
    agents = [specs[f"kv_transfer-{index}"].address for index in range(2)]
    served_by = [specs[f"decode-{i}"].env["PDMESH_KV_TRANSFER_ADDRESS"] for i in range(3)]
    assert served_by == [agents[0], agents[1], agents[0]]
    assert launch.topology["kv_transfer"]["disk_path"] == str(home.kv)
    assert specs["kv_transfer-1"].env["PDMESH_DISK_PATH"] == f"{home.kv}-1"
    own = [spec.env.get("PDMESH_METRICS_LISTEN") for spec in specs.values() if spec.role != "redis"]
    own += [spec.address for spec in specs.values()]
    assert len(set(own)) == len(own)


def test_what_up_is_told_wins_over_the_environment_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    home.run.mkdir()
    options = LaunchOptions(
        "smol", tmp_path, redis_url="redis://told/0", otlp_endpoint="http://told"
    )
    environment = {
        "REDIS_URL": "redis://around/0",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://around",
        "PDMESH_REDIS_URL": "redis://around/0",
        "PDMESH_LOG_LEVEL": "DEBUG",
    }

    launch = plan_launch(home, options, environment)

    write_topology(home, launch.topology)
    [scheduler] = [spec for spec in launch.specs if spec.role == "scheduler"]
    for name in environment:
        monkeypatch.delenv(name, raising=False)
    for name, value in scheduler.env.items():
        monkeypatch.setenv(name, value)
    settings = read(SchedulerConfig)
    assert settings.redis_url == "redis://told/0"
    assert settings.otlp_endpoint == "http://told"
    assert settings.log_level == "INFO"


async def test_who_else_answers_at_the_gateways_port_is_not_the_gateway(
    tmp_path: Path, healthy_port: int
) -> None:
    launch = plan_launch(Home(tmp_path), LaunchOptions("smol", tmp_path, port=healthy_port), {})
    [gateway] = [spec for spec in launch.specs if spec.role == "gateway"]

    assert not await gateway.probe()

    ours = MeshServer(launch.grpc_address)
    await ours.start()
    try:
        async with asyncio.timeout(20):
            while not await gateway.probe():
                pass
    finally:
        await ours.stop(0)
