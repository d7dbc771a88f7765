import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mesh.client import connect
from mesh.config import ConfigError, read
from mesh.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from tests.tokenizer_svc.synthetic import bytes_tokenizer, write_model
from tokenizer_svc.app import open_service
from tokenizer_svc.config import TokenizerConfig
from tokenizer_svc.models import InvalidModel
from tokenizer_svc.renderer import RenderLimits


class Service:
    """The tokenizer service as a process of its own."""

    def __init__(self, folder: Path) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PDMESH_")}
        environment["PDMESH_MODELS"] = json.dumps({"m": str(folder)})
        environment["PYTHONUNBUFFERED"] = "1"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tokenizer_svc"], env=environment, stdout=subprocess.PIPE
        )

    def address(self) -> str:
        """Once it serves."""
        while True:
            line = self.log_line()
            if line["message"] == "serving":
                return str(line["address"])

    def log_line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        parsed: dict[str, Any] = json.loads(self.process.stdout.readline())
        return parsed

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def wait(self) -> int:
        return self.process.wait(15)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(write_model(tmp_path, bytes_tokenizer(), chat_template="x"))
    yield service
    service.close()


async def test_the_process_ends_soon_on_a_signal_though_a_gateway_stays_connected(
    service: Service,
) -> None:
    channel = connect(service.address())
    stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    call = stub.Detokenize()
    await call.write(tokenizer_pb2.DetokenizeRequest(sequence_id=1))
    assert await call.read()
    children = service.children()
    assert len(children) == 2

    service.process.send_signal(signal.SIGTERM)

    assert service.wait() == 0
    assert not any(child.is_running() for child in children)
    await channel.close()


def test_no_process_is_left_when_the_service_is_killed(service: Service) -> None:
    service.address()
    children = service.children()

    service.process.kill()

    _, alive = psutil.wait_procs(children, timeout=10)
    assert len(children) == 2
    assert alive == []


def test_a_model_that_cannot_be_served_ends_the_process_with_a_reason(tmp_path: Path) -> None:
    service = Service(tmp_path / "nothing")

    line = service.log_line()

    assert line["level"] == "error"
    assert line["problem"] == f"{tmp_path / 'nothing' / 'config.json'}: missing"
    assert service.wait() == 1
    service.close()


async def test_models_loaded_before_one_that_fails_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "good", bytes_tokenizer(), chat_template="x")
    models = {"good": str(folder), "bad": str(tmp_path / "bad")}
    monkeypatch.setenv("PDMESH_MODELS", json.dumps(models))
    before = set(psutil.Process().children())

    with pytest.raises(InvalidModel, match="bad"), open_service(read(TokenizerConfig)):
        pytest.fail("a server without its models")

    assert set(psutil.Process().children()) == before


def test_settings_come_from_the_topology_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = tmp_path / "topology.yaml"
    topology.write_text("tokenizer:\n  models: {a: /a, b: /b}\n  encode_threads: 3\n")
    monkeypatch.setenv("PDMESH_TOPOLOGY", str(topology))
    monkeypatch.setenv("PDMESH_TEMPLATE_TIMEOUT_S", "0.5")

    config = read(TokenizerConfig)

    assert list(config.models) == ["a", "b"]
    assert config.encode_threads == 3
    assert config.render_limits == RenderLimits(timeout_s=0.5)
    assert config.worker_id == "tokenizer-0"


def test_models_can_be_written_in_the_environment_as_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDMESH_MODELS", "a=/models/a, b=/models/b=2")

    assert read(TokenizerConfig).models == {"a": "/models/a", "b": "/models/b=2"}
    monkeypatch.setenv("PDMESH_MODELS", "/models/a")
    with pytest.raises(ConfigError, match="PDMESH_MODELS: should be name=folder"):
        read(TokenizerConfig)


def test_at_least_one_model_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_MODELS", "{}")

    with pytest.raises(ConfigError, match="PDMESH_MODELS"):
        read(TokenizerConfig)
