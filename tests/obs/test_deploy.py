"""What is shipped for Prometheus, Grafana and the OpenTelemetry Collector fits the code."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mesh import instruments, metrics
from mesh.spans import SPANS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
RULES: dict[str, Any] = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())
GRAFANA: dict[str, Any] = json.loads((DEPLOY / "grafana" / "pdmesh.json").read_text())
# What the shipped configuration adds to every series.
TARGET_LABELS = {"service", "worker", "instance", "job", "le"}


def series() -> dict[str, set[str]]:
    """The names of all samples, and their labels."""
    found: dict[str, set[str]] = {}
    for one in metrics.describe():
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}
        for ending in endings.get(one.kind, [""]):
            name = instruments.prometheus_name(one) + ending
            found[name] = {label.replace(".", "_") for label in one.labels}
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for panel in GRAFANA["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_every_query_is_of_metrics_and_labels_that_exist(title: str, expression: str) -> None:
    known = series()
    recorded = {
        rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule
    }
    names = set(re.findall(r"\b(?:pdmesh|gen_ai)_\w+(?=[\[{ )]|$)", expression))
    labels_grouped = set(re.findall(r"\b(?:by|ignoring) \(([^)]*)\)", expression))

    used = {name for name in names if name not in {"gen_ai_request_model"}}
    assert used or any(record in expression for record in recorded) or "up{" in expression
    assert used <= set(known)
    allowed = TARGET_LABELS.union(*(known[name] for name in used))
    for group in labels_grouped:
        assert {label.strip() for label in group.split(",")} <= allowed
    for matched in re.findall(r"\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)\s*[=!]", matched)) <= allowed


def test_alerts_cover_what_operators_are_paged_for() -> None:
    alerts = {
        rule["alert"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule
    }

    assert alerts >= {
        "PdmeshFirstTokenSlow",
        "PdmeshErrors",
        "PdmeshQueue",
        "PdmeshKvCacheFull",
        "PdmeshCacheHitRateDropped",
        "PdmeshLeasesExpire",
        "PdmeshWorkerStalled",
        "PdmeshBuffering",
    }


@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "rules.yml"),
        ("test", "rules", "rules_test.yml"),
    ],
)
def test_promtool_accepts_the_configuration_and_the_rules_alert_when_they_should(
    command: tuple[str, ...],
) -> None:
    assert shutil.which("promtool"), "install promtool: make promtool"
    result = subprocess.run(
        ["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_understands_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [target["expr"] for panel in GRAFANA["panels"] for target in panel["targets"]]
    for variable, value in (("$__rate_interval", "5m"), ("$model", ".*")):
        queries = [query.replace(variable, value) for query in queries]
    records = [{"record": f"panel:{index}", "expr": one} for index, one in enumerate(queries)]
    file = tmp_path / "dashboard.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))

    result = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert not any("$" in query for query in queries)


def test_every_alert_is_shown_to_fire_and_to_stay_quiet() -> None:
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}

    assert {check["alertname"] for check in checks if check["exp_alerts"]} == alerts
    assert {check["alertname"] for check in checks if not check["exp_alerts"]} == alerts


def test_the_dashboard_can_be_imported() -> None:
    ids = [panel["id"] for panel in GRAFANA["panels"]]
    assert len(ids) == len(set(ids))
    assert {variable["name"] for variable in GRAFANA["templating"]["list"]} == {
        "datasource",
        "model",
    }
    places = [tuple(panel["gridPos"].values()) for panel in GRAFANA["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in GRAFANA["panels"])


def test_the_documentation_names_every_span_that_the_code_starts() -> None:
    started: set[str] = set()
    for folder in ("gateway", "worker", "*_svc"):
        for path in ROOT.glob(f"{folder}/**/*.py"):
            pattern = r"(?:\bspan|start_span|run_span)\(\s*\"([a-z_.]+)\""
            started |= set(re.findall(pattern, path.read_text()))

    assert started == {span.name for span in SPANS}
    names = {span.name for span in SPANS}
    parents = {parent for span in SPANS if span.parent for parent in span.parent.split(", ")}
    assert parents <= names


def test_the_documentation_is_up_to_date() -> None:
    page = (ROOT / "docs" / "telemetry.md").read_text()

    for one in metrics.describe():
        assert f"`{one.name}`" in page
    for image in re.findall(r"\]\((img/[^)]+)\)", page):
        assert (ROOT / "docs" / image).stat().st_size > 10_000
