"""What is shipped for Prometheus and Grafana asks for series that a real mesh has."""

import json
import re
from pathlib import Path

import httpx
import openai
import yaml

from tests.e2e.harness import MODEL, RunningMesh, metrics_addresses

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def asked_for() -> set[str]:
    """Every name in an expression of the rules, or of the dashboard."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    dashboard = json.loads((DEPLOY / "grafana" / "pdmesh.json").read_text())
    expressions = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    expressions += [one["expr"] for panel in dashboard["panels"] for one in panel["targets"]]
    # Labels are inside braces and behind `by`; names of recorded series have colons.
    text = re.sub(r"\{[^}]*\}|\b(?:by|ignoring) \([^)]*\)", " ", " ".join(expressions))
    return set(re.findall(r"\b(?:pdmesh|gen_ai)_\w+\b(?!:)", text))


def test_every_series_that_rules_and_dashboard_ask_for_is_there_after_one_request(
    mesh: RunningMesh, client: openai.OpenAI
) -> None:
    client.completions.create(model=MODEL, prompt="What is there to see? " * 20, max_tokens=8)

    pages = [httpx.get(f"http://{one}/metrics").text for one in metrics_addresses(mesh).values()]
    reported = {
        re.split("[ {]", line)[0]
        for page in pages
        for line in page.splitlines()
        if not line.startswith("#")
    }

    assert len(asked_for()) > 25
    assert asked_for() <= reported
    # A rare event is a series from the start: its first increase is one that a rule can see.
    assert any('pdmesh_kv_transfer_failures_total{reason="pull_failed"} ' in page for page in pages)
