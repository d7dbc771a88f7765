"""A short fuzz in every run, and what longer ones have found; `make fuzz` runs for minutes."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.inputs import ANY_BODY, CUTS, PAYLOADS
from tests.fuzz.targets import check_body, check_stream

SEEDS = sorted((Path(__file__).parent / "seeds").glob("*.json"))


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(body=ANY_BODY)
def test_any_body_is_served_or_refused_in_words(body: bytes) -> None:
    check_body(body)


@settings(max_examples=300)
@given(payloads=PAYLOADS, cuts=CUTS)
def test_any_stream_is_read_alike_by_all_clients(payloads: list[Any], cuts: list[int]) -> None:
    check_stream(payloads, cuts)


@pytest.mark.parametrize("path", SEEDS, ids=lambda path: path.stem)
def test_bodies_that_once_went_wrong(path: Path) -> None:
    check_body(path.read_bytes())
