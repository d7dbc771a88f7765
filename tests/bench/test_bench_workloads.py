"""Prompts have the asked lengths, share what they should share, and nothing else."""

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mesh.bench.prompts import Lengths, PromptMaker, Vocabulary
from mesh.bench.workloads import (
    LONG_PROMPTS,
    STREAMS,
    TraceError,
    agent,
    chat,
    interference,
    poisson,
    read_trace,
)


@pytest.fixture(scope="session")
def vocabulary(smollm2_path: Path) -> Vocabulary:
    return Vocabulary.from_folder(smollm2_path)


def exactly(num_tokens: int) -> Lengths:
    return Lengths(num_tokens, num_tokens)


@pytest.mark.parametrize(("text", "expected"), [("64", exactly(64)), ("32:128", Lengths(32, 128))])
def test_lengths_are_a_number_or_a_range(text: str, expected: Lengths) -> None:
    assert Lengths.parse(text) == expected


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "8:4", "1:2:3"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|neither"):
        Lengths.parse(text)


def test_chats_are_exact_in_tokens_and_never_the_same(vocabulary: Vocabulary) -> None:
    workload = chat(vocabulary, "completions", Lengths(60, 70), exactly(8))

    requests = list(islice(workload.requests(1), 50))

    assert {type(request.prompt) for request in requests} == {list}
    assert {len(request.prompt) for request in requests} <= set(range(60, 71))
    assert len({str(request.prompt) for request in requests}) == 50


def test_texts_are_as_long_in_tokens_as_asked(vocabulary: Vocabulary, smollm2_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))

    text = PromptMaker(vocabulary, 1).text(500)

    assert len(tokenizer.encode(text).ids) == pytest.approx(500, abs=5)


def test_a_seed_draws_the_same_requests_and_another_seed_others(vocabulary: Vocabulary) -> None:
    workload = chat(vocabulary, "completions", exactly(16), exactly(8))

    first, again, other = (list(islice(workload.requests(seed), 3)) for seed in (1, 1, 2))

    assert first == again
    assert first != other


def test_agents_share_their_prefix_over_rounds_and_differ_after_it(
    vocabulary: Vocabulary,
) -> None:
    workload = agent(vocabulary, "completions", 150, exactly(10), exactly(8))

    requests = [next(workload.requests((7, round_index))) for round_index in range(3)]
    assert workload.warm_up is not None
    requests.append(next(workload.warm_up((7, 0))))
    elsewhere = next(workload.requests((8, 0)))

    prompts = [request.prompt for request in requests]
    assert all(isinstance(prompt, list) and len(prompt) == 160 for prompt in prompts)
    assert len({str(prompt[:150]) for prompt in prompts}) == 1
    assert len({str(prompt[150:]) for prompt in prompts}) == 4
    assert elsewhere.prompt[:150] != prompts[0][:150]


def test_an_agents_chat_keeps_the_prefix_in_the_system_message(vocabulary: Vocabulary) -> None:
    workload = agent(vocabulary, "chat", 150, exactly(10), exactly(8))

    a, b = islice(workload.requests(1), 2)

    assert a.system == b.system is not None
    assert a.prompt != b.prompt


def test_interference_is_the_same_streams_with_and_without_long_prompts(
    vocabulary: Vocabulary,
) -> None:
    calm, disturbed = interference(
        vocabulary, "completions", exactly(64), exactly(256), exactly(4000)
    )

    assert calm.intruders is None
    assert disturbed.intruders is not None
    assert next(calm.requests(1)) == next(disturbed.requests(1))
    assert next(calm.requests(1)).group == STREAMS
    long = next(disturbed.intruders.requests(1))
    assert (long.group, len(long.prompt), long.max_tokens) == (LONG_PROMPTS, 4000, 4)


def test_arrivals_are_as_many_as_the_rate_says(vocabulary: Vocabulary) -> None:
    workload = chat(vocabulary, "completions", exactly(4), exactly(1))

    timed = poisson(workload, 3, rate=50.0, duration_s=40.0)

    times = [each.at_s for each in timed]
    assert len(times) == pytest.approx(2000, rel=0.1)
    assert times == sorted(times)
    gaps = [b - a for a, b in pairwise(times)]
    # Of an exponential distribution a share of 1/e is longer than the mean.
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.05)


def write_trace(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def line(at_ms: float, num_in: int, num_out: int, *hash_ids: int) -> dict[str, Any]:
    return {
        "timestamp": at_ms,
        "input_length": num_in,
        "output_length": num_out,
        "hash_ids": list(hash_ids),
    }


def test_a_trace_shares_blocks_as_it_was_recorded(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "t.jsonl",
        line(1000, 1100, 5, 1, 2, 3),
        line(3000, 1030, 7, 1, 2, 4),
        line(2000, 600, 9, 9, 2),
    )

    timed, num_too_long = read_trace(path, vocabulary, seed=1, speed=2.0)

    assert [each.at_s for each in timed] == [0.0, 0.5, 1.0]
    first, other, second = (each.request for each in timed)
    assert [len(each.prompt) for each in (first, second, other)] == [1100, 1030, 600]
    assert [each.max_tokens for each in (first, second, other)] == [5, 7, 9]
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:1030] != second.prompt[1024:1030]
    assert other.prompt[:512] != first.prompt[:512]
    assert num_too_long == 0


def test_each_round_of_a_trace_is_new_to_caches(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", line(0, 600, 5, 1, 2))

    (one,), _ = read_trace(path, vocabulary, seed=(1, 1))
    (two,), _ = read_trace(path, vocabulary, seed=(1, 2))

    assert one.request.prompt[:512] != two.request.prompt[:512]


def test_a_scaled_trace_keeps_its_sharing_and_leaves_out_what_is_too_long(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    path = write_trace(
        tmp_path / "t.jsonl",
        line(0, 1024, 40, 1, 2),
        line(1, 1024, 40, 1, 3),
        line(2, 100_000, 40, *range(10, 210)),
    )

    timed, num_too_long = read_trace(path, vocabulary, seed=1, length_scale=0.125, max_tokens=1000)

    assert num_too_long == 1
    a, b = (each.request for each in timed)
    assert (len(a.prompt), a.max_tokens) == (128, 5)
    assert a.prompt[:64] == b.prompt[:64]
    assert a.prompt[64:] != b.prompt[64:]


@pytest.mark.parametrize(
    "broken",
    [
        "nonsense",
        "[]",
        '{"timestamp": -1, "input_length": 1, "output_length": 1}',
        '{"timestamp": 0, "input_length": "1", "output_length": 1}',
        '{"timestamp": 0, "input_length": 1, "output_length": 0}',
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}',
    ],
)
def test_a_broken_line_is_named(vocabulary: Vocabulary, tmp_path: Path, broken: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(line(0, 5, 5)) + f"\n{broken}\n")

    with pytest.raises(TraceError, match=r"t\.jsonl:2"):
        read_trace(path, vocabulary, seed=1)


def test_a_trace_without_anything_to_replay_is_refused(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    path = write_trace(tmp_path / "t.jsonl", line(0, 5000, 5))

    with pytest.raises(TraceError, match="1 too long"):
        read_trace(path, vocabulary, seed=1, max_tokens=100)
