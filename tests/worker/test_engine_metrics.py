"""An engine's own counts on /metrics."""

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from engine.reports import EngineStats
from engine.speculation import DraftCounts
from mesh import metrics
from tests.fakes import make_engine
from worker.engine_metrics import watched_engine


class CountingEngine:
    """As much of an engine as is watched."""

    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats
        self.last_step_age_s = 0.0

    def load(self) -> EngineStats:
        return self.stats

    def observe_steps(self, observe: object) -> None:
        pass


def samples(name: str) -> dict[str, float]:
    return {
        sample.labels.get("position", ""): sample.value
        for family in text_string_to_metric_families(metrics.render()[0].decode())
        for sample in family.samples
        if sample.name == name
    }


def test_guesses_are_counted_by_place() -> None:
    engine = CountingEngine(make_engine().load())
    engine.stats = replace(engine.stats, drafts=DraftCounts(4, 11, (3, 2, 0)))

    with watched_engine(engine, "counted", block_size=4):  # type: ignore[arg-type]
        assert samples("pdmesh_speculation_drafts_total") == {"": 4}
        assert samples("pdmesh_speculation_draft_tokens_total") == {"": 11}
        assert samples("pdmesh_speculation_accepted_tokens_total") == {"": 5}
        by_place = samples("pdmesh_speculation_accepted_tokens_per_position_total")
        assert by_place == {"0": 3, "1": 2, "2": 0}
        engine.stats = replace(engine.stats, drafts=DraftCounts(5, 12, (4, 2, 0)))
        assert samples("pdmesh_speculation_drafts_total") == {"": 5}
