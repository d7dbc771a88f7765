"""What a worker is told, and what of it does not fit together."""

import pytest

from decode_svc.config import DecodeConfig
from mesh.config import ConfigError, read


def test_a_step_that_has_no_token_for_each_running_request_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDMESH_MODEL", "m")
    monkeypatch.setenv("PDMESH_MODEL_PATH", "/models/m")
    monkeypatch.setenv("PDMESH_MAX_NUM_SEQS", "257")

    with pytest.raises(ConfigError) as caught:
        read(DecodeConfig)

    [problem] = caught.value.problems
    assert problem.startswith("max_num_batched_tokens is 256, below max_num_seqs, 257")
