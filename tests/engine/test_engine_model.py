"""The engine over a real, tiny model of the Llama family: the same request, the same tokens."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv_cache import KvCache
from engine.model_runner import ModelRunner
from engine.request import RemoteKvWanted, Request
from engine.sampling import NextToken, Sampler, SamplingParams
from tests.fakes import ContentHasher, run_to_end, token_ids_of
from tests.tiny_llama import make_tiny_model, reference_logits

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, num_logprobs=2, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, seed=42, num_logprobs=2, ignore_eos=True)
PROMPTS = [[5, 17, 33, 90, 4, 61, 22] * (index + 1) + [index + 3] for index in range(6)]
EOS = frozenset({2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def naive(folder: Path) -> dict[tuple[int, ...], list[int]]:
    """transformers' logits of the whole sequence, again and again, and our sampler."""
    model = make_tiny_model(folder)
    results = {}
    for prompt in PROMPTS:
        for params in (GREEDY, SEEDED):
            request = Request("naive", list(prompt), params)
            sampler = Sampler(EOS)
            reason = None
            while reason is None:
                last = reference_logits(model, request.token_ids)[-1:].numpy().copy()
                [token] = sampler.sample(last, [NextToken.of(request)])
                assert token is not None
                request.append(token.token_id, 0.0)
                reason = request.finish_reason(EOS, 256)
            results[params.seed, *prompt] = request.output_token_ids
    return results


def make_engine(folder: Path, **limits: int | bool | None) -> Engine:
    values = {"block_size": 4, "num_blocks": 200, "max_num_seqs": 8} | limits
    config = replace(EngineConfig(folder), **values)  # type: ignore[arg-type]
    return build_engine(config, lambda fields: ContentHasher())


def requests_of(params: SamplingParams) -> list[Request]:
    return [Request(f"r{i}", list(prompt), params) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 8},
        {"max_num_batched_tokens": 9},
        {"long_prefill_token_threshold": 3},
        # Too few blocks for all: some are preempted.
        {"num_blocks": 20, "max_num_batched_tokens": 64},
        {"enable_prefix_caching": False},
    ],
    ids=["alone", "batched", "in chunks", "in small chunks", "preempted", "uncached"],
)
def test_tokens_equal_those_of_a_naive_loop(
    folder: Path,
    naive: dict[tuple[int, ...], list[int]],
    params: SamplingParams,
    limits: dict[str, int],
) -> None:
    # SA-05, KV-14
    engine = make_engine(folder, **limits)

    outputs = run_to_end(engine, *requests_of(params))

    for index, prompt in enumerate(PROMPTS):
        assert token_ids_of(outputs[f"r{index}"]) == naive[params.seed, *prompt]
    assert (engine.load().num_preemptions > 0) == ("num_blocks" in limits)
    assert engine.load().num_free_blocks == engine.num_blocks
    engine.close()


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_warm_cache_gives_the_cold_tokens_and_log_probabilities(
    folder: Path, params: SamplingParams
) -> None:
    # KV-05
    engine = make_engine(folder)

    cold = run_to_end(engine, *requests_of(params))
    warm = run_to_end(engine, *requests_of(params))

    for request_id, expected in cold.items():
        assert token_ids_of(warm[request_id]) == token_ids_of(expected)
        assert warm[request_id][-1].num_cached_tokens > 0
        for now, before in zip(warm[request_id], expected, strict=True):
            assert now.logprobs is not None
            assert before.logprobs is not None
            assert now.logprobs.logprob == pytest.approx(before.logprobs.logprob, abs=1e-4)
    engine.close()


def kv_cache_of(engine: Engine) -> KvCache:
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    return runner._kv_cache


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_two_engines_give_the_tokens_of_one(
    folder: Path, naive: dict[tuple[int, ...], list[int]], params: SamplingParams
) -> None:
    source, destination = make_engine(folder), make_engine(folder)
    for index, prompt in enumerate(PROMPTS):
        held = Request(f"r{index}", list(prompt), params, hold_blocks=True)
        [first] = run_to_end(source, held)[held.request_id]
        destination.add_request(
            Request(f"r{index}", list(prompt), params, [first.token_id], remote_kv=True)
        )

        [wanted] = destination.step()
        assert isinstance(wanted, RemoteKvWanted)
        source_ids = list(first.held_block_ids[wanted.first_block_index :])
        kv_cache_of(destination).memory[list(wanted.block_ids)] = kv_cache_of(source).memory[
            source_ids
        ]
        destination.remote_kv_done(f"r{index}")
        source.release_hold(f"r{index}")
        rest = run_to_end(destination)[f"r{index}"]

        assert [first.token_id, *token_ids_of(rest)] == naive[params.seed, *prompt]
    source.close()
    destination.close()


def test_the_cache_is_as_large_as_its_memory_allows(folder: Path) -> None:
    config = EngineConfig(folder, block_size=4, kv_cache_memory_bytes=1 << 20)

    engine = build_engine(config, lambda fields: ContentHasher())

    assert engine.num_blocks == (1 << 20) // engine.block_bytes
    assert engine.block_bytes == kv_cache_of(engine).layout.block_bytes
    assert engine.max_model_len == 256
    engine.close()


def test_a_window_larger_than_the_model_s_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="max_model_len is 257"):
        make_engine(folder, max_model_len=257)


def test_a_step_may_have_more_tokens_than_a_sequence(
    folder: Path, naive: dict[tuple[int, ...], list[int]]
) -> None:
    longest = len(PROMPTS[-1]) + GREEDY.max_tokens
    engine = make_engine(folder, max_model_len=longest, max_num_batched_tokens=2 * longest + 1)

    outputs = run_to_end(engine, *requests_of(GREEDY))

    for index, prompt in enumerate(PROMPTS):
        assert token_ids_of(outputs[f"r{index}"]) == naive[GREEDY.seed, *prompt]
    engine.close()
