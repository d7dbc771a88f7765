"""What is learnt from requests that are over."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.estimates import Estimates, LinearModel, PrefillTime
from scheduler_svc.workers import Role


def true_prefill_s(num_tokens: int, num_cached_tokens: int) -> float:
    return 0.01 + 0.0002 * num_tokens + 2e-8 * num_tokens * (num_cached_tokens + num_tokens / 2)


def test_prefill_time_is_learnt_and_holds_for_lengths_that_were_not_seen() -> None:
    chance, model = Random(1), PrefillTime()
    for _ in range(100):
        num_tokens, num_cached = chance.randrange(50, 8000), chance.randrange(0, 4000)
        noise = chance.uniform(0.95, 1.05)
        model.observe(num_tokens, num_cached, noise * true_prefill_s(num_tokens, num_cached))

    for num_tokens, num_cached in [(32, 0), (500, 8000), (16_000, 0)]:
        expected = true_prefill_s(num_tokens, num_cached)
        assert model.predict(num_tokens, num_cached) == pytest.approx(expected, rel=0.15)
    assert model.backlog(0) == 0


def test_prompts_of_one_length_only_do_not_make_the_model_go_wild() -> None:
    model = PrefillTime()
    for _ in range(100):
        model.observe(1000, 0, 0.2)

    assert model.predict(1000) == pytest.approx(0.2, rel=0.01)
    assert 0 <= model.predict(10) <= 0.2
    assert 0.2 <= model.predict(4000) <= 4.0


def test_machine_that_becomes_slower_is_learnt_anew() -> None:
    model = PrefillTime()
    for _ in range(300):
        model.observe(1000, 0, 0.1)
    for _ in range(1000):
        model.observe(1000, 0, 0.3)

    assert model.predict(1000) == pytest.approx(0.3, rel=0.15)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(0, 100)), min_size=1, max_size=40
    )
)
def test_times_are_never_negative(samples: list[tuple[float, float, float]]) -> None:
    model = LinearModel(3, min_samples=1)
    for first, second, target in samples:
        model.observe((1.0, first, second), target)

    assert model.predict((1.0, 0.0, 0.0)) >= 0
    assert model.predict((1.0, 10.0, 3.0)) >= 0


def test_role_that_computes_no_prompts_is_taken_to_be_like_the_other() -> None:
    estimates = Estimates()
    assert estimates.prefill_time(Role.DECODE) is None
    for _ in range(20):
        estimates.prefill[Role.PREFILL].observe(1000, 0, 0.2)

    assert estimates.prefill_time(Role.DECODE) is estimates.prefill[Role.PREFILL]
    assert estimates.prefill_tokens_per_second == pytest.approx(5000, rel=0.01)
    for _ in range(20):
        estimates.prefill[Role.DECODE].observe(1000, 0, 0.4)
    assert estimates.prefill_time(Role.DECODE) is estimates.prefill[Role.DECODE]


def test_transfer_and_step_times_are_unknown_until_they_are_measured() -> None:
    chance, estimates = Random(2), Estimates()
    assert estimates.transfer_s(100) is None
    assert estimates.step_s(4) is None
    for _ in range(40):
        num_tokens, num_running = chance.randrange(16, 4000), chance.randrange(1, 32)
        estimates.observe_transfer(num_tokens, 0.002 + num_tokens / 100_000)
        estimates.observe_decode(50, num_running, 50 * (0.01 + 0.001 * num_running))

    assert estimates.transfer_s(2000) == pytest.approx(0.022, rel=0.02)
    assert estimates.transfer_tokens_per_second == pytest.approx(1000 / 0.012, rel=0.05)
    assert estimates.step_s(16) == pytest.approx(0.026, rel=0.02)
    assert estimates.decode_s == pytest.approx(1.3, rel=0.5)
