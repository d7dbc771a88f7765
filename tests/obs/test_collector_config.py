"""The shipped configuration of the OpenTelemetry Collector.

The collector itself is not to be had from a package registry, so nothing here runs it. Its
loader refuses unknown keys and wrong kinds, and so do these models of the parts that are used,
made after the `config.go` of each. What the tail rules would keep is worked out on the
attributes that the gateway really sets.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.finished import FinishedRequest
from mesh.v1 import types_pb2
from tests.obs.test_dashboard import DONE

FILE = Path(__file__).resolve().parents[2] / "deploy" / "otel-collector" / "config.yaml"
Duration = Annotated[str, Field(pattern=r"^\d+(ms|s|m|h)$")]
Address = Annotated[str, Field(pattern=r"^[\w.:\[\]-]+:\d+$")]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class OtlpProtocol(Part):
    endpoint: Address


class OtlpProtocols(Part):
    grpc: OtlpProtocol


class OtlpReceiver(Part):
    protocols: OtlpProtocols


class MemoryLimiter(Part):
    check_interval: Duration
    limit_mib: int
    spike_limit_mib: int


class StatusCodes(Part):
    status_codes: list[Literal["OK", "ERROR", "UNSET"]]


class Latency(Part):
    threshold_ms: int


class NumericAttribute(Part):
    key: str
    min_value: int
    max_value: int


class Condition(Part):
    error_mode: Literal["ignore", "silent", "propagate"]
    span: list[str]


class Probabilistic(Part):
    sampling_percentage: float


class Policy(Part):
    name: str
    type: Literal["status_code", "latency", "numeric_attribute", "ottl_condition", "probabilistic"]
    status_code: StatusCodes | None = None
    latency: Latency | None = None
    numeric_attribute: NumericAttribute | None = None
    ottl_condition: Condition | None = None
    probabilistic: Probabilistic | None = None

    def keeps(self, done: FinishedRequest) -> bool:
        """Whether it keeps a trace whose root span is this request's; by chance is no reason."""
        attributes = done.span_attributes()
        if self.status_code is not None:
            return done.error is not None and "ERROR" in self.status_code.status_codes
        if self.latency is not None:
            return done.total_ms >= self.latency.threshold_ms
        if (rule := self.numeric_attribute) is not None:
            # The collector reads an integer; of any other kind of value it sees 0.
            value = attributes.get(rule.key)
            seen = value if type(value) is int else 0
            return rule.key in attributes and rule.min_value <= seen <= rule.max_value
        if self.ottl_condition is not None:
            return any(holds(one, attributes) for one in self.ottl_condition.span)
        return False


class TailSampling(Part):
    decision_wait: Duration
    num_traces: int
    expected_new_traces_per_sec: int
    policies: list[Policy]


class Batch(Part):
    timeout: Duration


class Processors(Part):
    memory_limiter: MemoryLimiter
    tail_sampling: TailSampling
    batch: Batch


class Tls(Part):
    insecure: bool


class OtlpExporter(Part):
    endpoint: str
    tls: Tls


class HealthCheck(Part):
    endpoint: Address


class Pipeline(Part):
    receivers: list[str]
    processors: list[str]
    exporters: list[str]


class Service(Part):
    extensions: list[str]
    pipelines: dict[Literal["traces", "metrics", "logs"], Pipeline]


class CollectorConfig(Part):
    receivers: dict[Literal["otlp"], OtlpReceiver]
    processors: Processors
    exporters: dict[Annotated[str, Field(pattern=r"^otlp(/\w+)?$")], OtlpExporter]
    extensions: dict[Literal["health_check"], HealthCheck]
    service: Service


def read() -> Any:
    return yaml.safe_load(FILE.read_text())


def holds(condition: str, attributes: Mapping[str, object]) -> bool:
    """One comparison of an attribute with a number; an absent attribute never holds."""
    matched = re.fullmatch(r'attributes\["([\w.]+)"\] >= (\d+\.\d+)', condition)
    assert matched, f"{condition} is not of the form that this test can work out"
    value = attributes.get(matched[1])
    return isinstance(value, int | float) and value >= float(matched[2])


def test_the_collector_knows_every_key_of_its_configuration() -> None:
    CollectorConfig.model_validate(read())


def test_a_misspelt_key_would_be_found() -> None:
    config = read()
    config["processors"]["tail_sampling"]["decision_wait_s"] = 3

    with pytest.raises(ValidationError, match="decision_wait_s"):
        CollectorConfig.model_validate(config)


def test_everything_is_used_in_the_order_that_the_collector_asks_for() -> None:
    config = read()
    [pipeline] = config["service"]["pipelines"].values()

    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) == set(config[kind])
    # Memory is watched before anything is kept; batches are made of what is left.
    assert pipeline["processors"] == ["memory_limiter", "tail_sampling", "batch"]
    assert config["service"]["extensions"] == list(config["extensions"])
    # Only what an operator has to say comes from the environment.
    assert set(re.findall(r"\$\{(.*?)\}", FILE.read_text())) == {"env:TRACE_BACKEND"}


KEPT = {
    "errors": replace(DONE, error="worker_unavailable", status=503),
    "slow": replace(DONE, total_ms=6000.0),
    "long-queues": replace(DONE, stages_ms={types_pb2.STAGE_QUEUE: 612.4}),
    "failovers": replace(DONE, num_attempts=2),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_an_operator_looks_for_is_kept(name: str) -> None:
    policies = CollectorConfig.model_validate(read()).processors.tail_sampling.policies

    assert [one.name for one in policies if one.keeps(KEPT[name])] == [name]


def test_what_went_well_is_kept_by_chance_only() -> None:
    policies = CollectorConfig.model_validate(read()).processors.tail_sampling.policies

    assert not any(one.keeps(DONE) for one in policies)
    assert [one.probabilistic for one in policies if one.type == "probabilistic"] != []
    assert all(getattr(one, one.type) is not None for one in policies)
