"""The scheduler's settings: defaults, limits, and what they become."""

import pytest
from pydantic import ValidationError

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.placement import ModePolicy, PlacementSettings


def test_defaults_suit_a_mesh_on_cpus() -> None:
    config = SchedulerConfig.model_validate({})

    assert config.placement == PlacementSettings()
    assert config.placement.local_prefill_max_tokens == 32
    assert config.queue.max_num_waiting == 256


def test_settings_reach_placement_and_queue() -> None:
    config = SchedulerConfig.model_validate(
        {
            "mode": "disaggregated",
            "local_prefill_max_tokens": 64,
            "local_prefill_max_ratio": 0.7,
            "max_num_seqs": 4,
            "reserved_output_tokens": 8,
            "credit_decay": 2,
            "max_num_waiting": 5,
            "max_overtaken_s": 10,
        }
    )

    assert config.placement.mode is ModePolicy.DISAGGREGATED
    assert config.placement.local_prefill_max_tokens == 64
    assert config.placement.local_prefill_max_ratio == 0.7
    assert config.placement.max_num_seqs == 4
    assert config.placement.reserved_output_tokens == 8
    assert config.placement.weights.credit_decay == 2
    assert (config.queue.max_num_waiting, config.queue.max_overtaken_s) == (5, 10)


@pytest.mark.parametrize(
    "setting",
    [
        {"mode": "remote"},
        {"max_num_seqs": 0},
        {"max_num_waiting": -1},
        {"local_prefill_max_ratio": 1.1},
        {"lookup_timeout_s": 0},
        {"max_queue_wait": 1},
    ],
)
def test_nonsense_is_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SchedulerConfig.model_validate(setting)
