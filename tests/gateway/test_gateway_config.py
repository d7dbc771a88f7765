"""Settings of the gateway: what is refused at the start."""

from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from mesh.config import ConfigError, read


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_permission(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("PDMESH_HOST", host)

    assert read(GatewayConfig).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_reachable_host_is_refused_without_keys_unless_allowed(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("PDMESH_HOST", host)
    with pytest.raises(ConfigError) as caught:
        read(GatewayConfig)
    assert "allow_unauthenticated" in str(caught.value)

    monkeypatch.setenv("PDMESH_ALLOW_UNAUTHENTICATED", "true")
    assert read(GatewayConfig).host == host


@pytest.mark.parametrize("address", ["0.0.0.0:50050", "[::]:50050", "192.168.1.5:0"])
def test_reachable_inference_service_is_refused_without_keys_unless_allowed(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("PDMESH_INFERENCE_LISTEN", address)
    with pytest.raises(ConfigError, match="inference_listen"):
        read(GatewayConfig)

    monkeypatch.setenv("PDMESH_ALLOW_UNAUTHENTICATED", "true")
    assert read(GatewayConfig).inference_listen == address


def test_inference_service_on_loopback_needs_no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_INFERENCE_LISTEN", "[::1]:50050")

    assert read(GatewayConfig).inference_listen == "[::1]:50050"


def test_all_problems_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_PORT", "99999")
    monkeypatch.setenv("PDMESH_MAX_ATTEMPTS", "0")
    monkeypatch.setenv("PDMESH_QUEUE_TIMEOUT", "1")

    with pytest.raises(ConfigError) as caught:
        read(GatewayConfig)

    assert len(caught.value.problems) == 3
    assert "PDMESH_QUEUE_TIMEOUT_S" in str(caught.value)


def test_keys_open_other_interfaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    monkeypatch.setenv("PDMESH_HOST", "0.0.0.0")
    monkeypatch.setenv("PDMESH_KEYS_PATH", str(keys))
    with pytest.raises(ConfigError, match="pdmesh key add"):
        read(GatewayConfig)

    keys.write_text("{}")
    assert read(GatewayConfig).host == "0.0.0.0"

    keys.unlink()
    monkeypatch.setenv("PDMESH_KEYS_IN_REDIS", "true")
    assert read(GatewayConfig).has_keys


def test_keys_in_two_places_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text("{}")
    monkeypatch.setenv("PDMESH_KEYS_PATH", str(keys))
    monkeypatch.setenv("PDMESH_KEYS_IN_REDIS", "true")

    with pytest.raises(ConfigError, match="one place"):
        read(GatewayConfig)


def test_origins_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_CORS_ORIGINS", "https://a.example, https://b.example")

    assert read(GatewayConfig).cors_origins == ["https://a.example", "https://b.example"]
