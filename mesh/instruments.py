"""Kinds of instruments, with bounded labels, and the registry behind /metrics."""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, product

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

OTHER = "other"

# Own registry and provider: nothing else in the process can add to or break /metrics.
REGISTRY = CollectorRegistry()
_provider = MeterProvider(
    metric_readers=[
        PrometheusMetricReader(
            disable_target_info=True, scope_info_enabled=False, registry=REGISTRY
        )
    ],
    resource=Resource.get_empty(),
    shutdown_on_exit=False,
)
_meter = _provider.get_meter("pdmesh")


@dataclass(frozen=True)
class Description:
    """What the documentation says of an instrument."""

    name: str
    kind: str
    unit: str
    text: str
    labels: tuple[str, ...]
    # The service that reports it.
    service: str


# Of every instrument, in the order of declaration.
DESCRIPTIONS: list[Description] = []

_UNITS = {"s": "_seconds", "By": "_bytes"}


def prometheus_name(described: Description) -> str:
    """The family's name on /metrics; a counter's samples end in `_total` on top."""
    return described.name.replace(".", "_") + _UNITS.get(described.unit, "")


class Values:
    """The values that a label may take; every other one becomes "other".

    What a client sends can therefore never add a series.
    """

    def __init__(self, *names: str, max_values: int = 64) -> None:
        # By name, as plain strings: OpenTelemetry takes a member of a StrEnum for another value
        # than the string that it equals, and would report two series with the same labels.
        self._names = {str(name): str(name) for name in names}
        self._max_values = max_values

    def allow(self, *names: str) -> None:
        """Add values that the operator chose, such as the names of served models."""
        for name in names:
            if len(self._names) < self._max_values:
                self._names[str(name)] = str(name)

    def pick(self, value: str) -> str:
        return self._names.get(value, OTHER)

    @property
    def names(self) -> frozenset[str]:
        """All but "other"."""
        return frozenset(self._names)

    def only(self) -> str | None:
        """The value, where there is one."""
        return next(iter(self._names)) if len(self._names) == 1 else None


Labels = Mapping[str, Values]
NO_LABELS: Labels = {}


class Counter:
    """Only goes up."""

    def __init__(
        self, name: str, unit: str, text: str, labels: Labels = NO_LABELS, *, service: str
    ) -> None:
        self._labels = labels
        self._counter = _meter.create_counter(name, unit, text)
        DESCRIPTIONS.append(Description(name, "counter", unit, text, tuple(labels), service))

    def begin(self) -> None:
        """Report 0 from now on, for every combination of labels.

        A series that is not there before its first increase comes with it, and `increase()`
        sees none: an alert on something rare would miss the first time that it happens.
        """
        for values in product(*(sorted(one.names) for one in self._labels.values())):
            self._counter.add(0, dict(zip(self._labels, values, strict=True)))

    def add(self, amount: float, values: Mapping[str, str] | None = None) -> None:
        self._counter.add(amount, _bounded(self._labels, values))


class Histogram(Collector):
    """Distribution of a measurement over fixed buckets.

    It counts by itself: one is recorded for each token, and OpenTelemetry's takes fifty times as
    long. The registry's text is the same.
    """

    def __init__(
        self,
        name: str,
        unit: str,
        text: str,
        buckets: Iterable[float],
        labels: Labels = NO_LABELS,
        *,
        service: str,
    ) -> None:
        self._labels = labels
        self._bounds = tuple(buckets)
        self._series: dict[tuple[tuple[str, str], ...], _Series] = {}
        # Scrapes have threads of their own.
        self._lock = threading.Lock()
        self._description = Description(name, "histogram", unit, text, tuple(labels), service)
        DESCRIPTIONS.append(self._description)
        REGISTRY.register(self)

    def record(self, amount: float, values: Mapping[str, str] | None = None) -> None:
        key = tuple(sorted(_bounded(self._labels, values).items()))
        with self._lock:
            series = self._series.get(key)
            if series is None:
                series = self._series[key] = _Series([0] * (len(self._bounds) + 1))
            # A bound belongs to the bucket below it.
            series.counts[bisect_left(self._bounds, amount)] += 1
            series.total += amount

    def describe(self) -> Iterable[Metric]:
        # Without this, registering would collect.
        return ()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            taken = [(dict(key), [*one.counts], one.total) for key, one in self._series.items()]
        if not taken:
            return
        names = sorted({name for labels, _, _ in taken for name in labels})
        family = HistogramMetricFamily(
            prometheus_name(self._description),
            self._description.text,
            labels=[name.replace(".", "_") for name in names],
        )
        bounds = [*map(str, self._bounds), "+Inf"]
        for labels, counts, total in taken:
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric([labels.get(name, "") for name in names], buckets, total)
        yield family


@dataclass
class _Series:
    """What was recorded with one set of labels: a count for each bucket, and the sum."""

    counts: list[int]
    total: float = 0.0


class _Watched:
    """Reads its value, when /metrics is read, from whoever keeps it."""

    def __init__(self, kind: str, name: str, unit: str, text: str, labels: Labels, service: str):
        self._labels = labels
        self._readers: dict[object, tuple[Callable[[], float], Mapping[str, str]]] = {}
        DESCRIPTIONS.append(Description(name, kind, unit, text, tuple(labels), service))

    def watch(
        self, read: Callable[[], float], values: Mapping[str, str] | None = None
    ) -> Callable[[], None]:
        """Report what `read` returns from now on; call the result to stop."""
        key = object()
        self._readers[key] = (read, _bounded(self._labels, values))
        return lambda: self._readers.pop(key, None) and None

    def _observe(self, options: CallbackOptions) -> Iterator[Observation]:
        for read, values in list(self._readers.values()):
            yield Observation(read(), values)


class Gauge(_Watched):
    """Goes up and down."""

    def __init__(
        self, name: str, unit: str, text: str, labels: Labels = NO_LABELS, *, service: str
    ) -> None:
        super().__init__("gauge", name, unit, text, labels, service)
        _meter.create_observable_gauge(name, [self._observe], unit, text)


class WatchedCounter(_Watched):
    """Only goes up, and is counted elsewhere."""

    def __init__(
        self, name: str, unit: str, text: str, labels: Labels = NO_LABELS, *, service: str
    ) -> None:
        super().__init__("counter", name, unit, text, labels, service)
        _meter.create_observable_counter(name, [self._observe], unit, text)


def _bounded(labels: Labels, values: Mapping[str, str] | None) -> dict[str, str]:
    """Labels not given are left out; one that was not declared is a bug."""
    if not values:
        return {}
    return {name: labels[name].pick(value) for name, value in values.items()}
