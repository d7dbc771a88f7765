"""vLLM's names on /metrics, for whoever reads those."""

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mesh import instruments, metrics
from mesh.vllm_names import RENAMED


@pytest.fixture(autouse=True)
def vllm_names() -> Iterator[None]:
    metrics.listen(None, vllm_names=True)
    metrics.listen(None, vllm_names=True)
    yield
    metrics.forget_vllm_names()


def series(name: str) -> dict[tuple[tuple[str, str], ...], float]:
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render()[0].decode())
        for sample in family.samples
        if sample.name == name
    }


def by(label: str, name: str) -> dict[str, float]:
    return {dict(labels)[label]: value for labels, value in series(name).items()}


def test_an_engines_gauges_have_vllms_names_and_labels() -> None:
    stops = [
        metrics.NUM_RUNNING.watch(lambda: 3),
        metrics.KV_CACHE_USAGE.watch(lambda: 0.25),
        metrics.PROMPT_TOKENS.watch(lambda: 40, {"source": "local_cache_hit"}),
        metrics.PROMPT_TOKENS.watch(lambda: 2, {"source": "external_kv_transfer"}),
        metrics.NUM_WAITING.watch(lambda: 5, {"reason": "capacity"}),
        metrics.NUM_WAITING.watch(lambda: 1, {"reason": "deferred"}),
    ]
    try:
        [(labels, running)] = series("vllm:num_requests_running").items()
        assert running == 3
        assert {name for name, _ in labels} == {"model_name", "engine"}
        assert list(series("vllm:kv_cache_usage_perc").values()) == [0.25]
        assert list(series("vllm:prefix_cache_hits_total").values()) == [40]
        assert by("source", "vllm:prompt_tokens_by_source_total") == {
            "local_cache_hit": 40,
            "external_kv_transfer": 2,
        }
        assert list(series("vllm:num_requests_waiting").values()) == [6]
        assert by("reason", "vllm:num_requests_waiting_by_reason") == {
            "capacity": 5,
            "deferred": 1,
        }
    finally:
        for stop in stops:
            stop()


def test_series_that_differ_only_in_our_labels_are_added_up() -> None:
    metrics.MODELS.allow("vllm-named")
    model = {"gen_ai.request.model": "vllm-named"}
    metrics.TOKENS.add(7, {"type": "prompt", **model})
    metrics.TOKENS.add(2, {"type": "completion", **model})
    for operation in ("chat", "text_completion"):
        metrics.TIME_TO_FIRST_TOKEN.record(0.02, {"gen_ai.operation.name": operation, **model})

    labels = (("engine", "0"), ("model_name", "vllm-named"))
    assert series("vllm:prompt_tokens_total")[labels] == 7
    assert series("vllm:generation_tokens_total")[labels] == 2
    assert series("vllm:time_to_first_token_seconds_count")[labels] == 2
    bucket = (("engine", "0"), ("le", "0.02"), ("model_name", "vllm-named"))
    assert series("vllm:time_to_first_token_seconds_bucket")[bucket] == 2


def test_the_layout_of_the_cache_is_told_as_autoscalers_read_it() -> None:
    metrics.CACHE_BLOCK_SIZES.allow("16")
    metrics.CACHE_SIZES.allow("512")
    stop = metrics.KV_CACHE_CONFIG.watch(lambda: 1, {"block_size": "16", "num_blocks": "512"})

    [(labels, value)] = series("vllm:cache_config_info").items()

    assert value == 1
    assert {"block_size": "16", "num_gpu_blocks": "512"}.items() <= dict(labels).items()
    stop()


# What vLLM's own dashboards, llm-d and KEDA recipes ask for.
READ_ELSEWHERE = {
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "cache_config_info",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_by_source",
    "prompt_tokens_cached",
    "generation_tokens",
    "request_success",
    "corrupted_requests",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
    "kv_block_lifetime_seconds",
    "kv_block_idle_before_evict_seconds",
    "kv_block_reuse_gap_seconds",
    "nixl_xfer_time_seconds",
    "nixl_bytes_transferred",
    "nixl_num_descriptors",
    "nixl_num_failed_transfers",
    "nixl_num_failed_notifications",
    "nixl_num_kv_expired_reqs",
}


def test_names_that_dashboards_and_autoscalers_read_are_there() -> None:
    assert {f"vllm:{name}" for name in READ_ELSEWHERE} == {one.theirs for one in RENAMED}


def test_every_renamed_family_is_one_of_ours() -> None:
    ours = {instruments.prometheus_name(one) for one in metrics.describe()}

    assert {renamed.ours for renamed in RENAMED} <= ours


def test_without_the_setting_nothing_has_vllms_names() -> None:
    metrics.forget_vllm_names()

    assert b"vllm:" not in metrics.render()[0]
