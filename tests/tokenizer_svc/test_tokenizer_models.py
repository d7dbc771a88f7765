import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer_svc.synthetic import Json, bytes_tokenizer, encode, write_model
from tokenizer_svc.models import InvalidModel, SamplingDefaults, TokenizerModel, load_model
from tokenizer_svc.renderer import RenderLimits

Load = Callable[[Path], TokenizerModel]


def refusal(folder: Path) -> str:
    with pytest.raises(InvalidModel) as caught:
        load_model("m", folder, RenderLimits(num_processes=1))
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_the_default_model_is_described(smollm2: TokenizerModel, smollm2_path: Path) -> None:
    tokenizer_file = (smollm2_path / "tokenizer.json").read_bytes()

    assert smollm2.max_model_len == 8192
    assert smollm2.vocabulary.size == 49152
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.tokenizer_sha256 == hashlib.sha256(tokenizer_file).hexdigest()
    assert smollm2.renderer is not None


def test_a_window_can_be_narrowed_but_not_widened(tmp_path: Path) -> None:
    folder = write_model(tmp_path, bytes_tokenizer())
    limits = RenderLimits()

    for max_model_len, expected in ((100, 100), (1000, 512), (None, 512)):
        model = load_model("m", folder, limits, max_model_len=max_model_len)
        assert model.max_model_len == expected


# B1: the tokenizer must be that of the weights.
@pytest.mark.parametrize("vocab_size", [257, 300])
def test_a_tokenizer_that_does_not_fit_the_weights_is_refused(
    tmp_path: Path, vocab_size: int
) -> None:
    folder = write_model(tmp_path, bytes_tokenizer(), config={"vocab_size": vocab_size})

    assert "belongs to another model" in refusal(folder)


def test_a_few_padded_rows_are_accepted(tmp_path: Path, load: Load) -> None:
    model = load(write_model(tmp_path, bytes_tokenizer(), config={"vocab_size": 272}))

    assert model.vocabulary.token_bytes[271] == b""


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("config.json", None, "missing"),
        ("config.json", "{", "not readable as JSON"),
        ("config.json", "[]", "expected a JSON object"),
        ("config.json", '{"vocab_size": 258}', "max_position_embeddings must be"),
        ("tokenizer.json", None, "missing"),
        ("tokenizer.json", '{"model": {"type": "Nope", "vocab": {}}}', "not a tokenizer"),
        ("generation_config.json", '{"eos_token_id": [1, 999]}', "999"),
        ("generation_config.json", '{"temperature": "hot"}', "temperature must be a number"),
        ("generation_config.json", '{"top_k": 1.5}', "top_k must be a number"),
        ("chat_template.jinja", "{% if %}", "the chat template does not compile"),
        ("tokenizer_config.json", '{"chat_template": [1]}', "chat_template is neither"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "rag", "template": "x"}]}',
            "no chat template is called 'default'",
        ),
    ],
)
def test_a_broken_folder_is_refused_with_what_and_where(
    tmp_path: Path, name: str, content: str | None, problem: str
) -> None:
    folder = write_model(tmp_path, bytes_tokenizer())
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)

    assert problem in refusal(folder)


def test_a_template_file_wins_over_the_entry_in_the_config(tmp_path: Path, load: Load) -> None:
    folder = write_model(tmp_path, bytes_tokenizer(), chat_template="{% broken")
    (folder / "chat_template.jinja").write_text("from the file")

    assert load(folder).renderer is not None


@pytest.mark.parametrize(
    ("generation_config", "config", "special_tokens", "expected"),
    [
        ({"eos_token_id": [3, 5]}, {"eos_token_id": 1}, {}, (3, 5)),
        ({}, {"eos_token_id": 1}, {}, (1,)),
        (None, {"eos_token_id": None}, {"eos_token": "<|im_end|>"}, (257,)),
    ],
)
def test_end_tokens_come_from_the_most_specific_file(
    tmp_path: Path,
    load: Load,
    generation_config: Json | None,
    config: Json,
    special_tokens: dict[str, str],
    expected: tuple[int, ...],
) -> None:
    folder = write_model(
        tmp_path,
        bytes_tokenizer(),
        config=config,
        generation_config=generation_config,
        special_tokens=special_tokens,
    )

    assert load(folder).eos_token_ids == expected


def test_sampling_defaults_are_those_of_generation_config(tmp_path: Path, load: Load) -> None:
    generation_config: Json = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 7}

    model = load(write_model(tmp_path, bytes_tokenizer(), generation_config=generation_config))

    assert model.sampling_defaults == SamplingDefaults(temperature=0.6, top_k=20)


@pytest.mark.parametrize("form", ["<s>", {"content": "<s>", "lstrip": False}])
def test_special_tokens_come_as_text_or_as_an_object(tmp_path: Path, load: Load, form: Any) -> None:
    folder = write_model(tmp_path, bytes_tokenizer(("<s>", "</s>")))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": form}))

    assert load(folder).bos_token_id == 256


def test_truncation_and_padding_of_a_training_run_are_switched_off(
    tmp_path: Path, load: Load
) -> None:
    tokenizer = bytes_tokenizer()
    tokenizer["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    model = load(write_model(tmp_path, tokenizer))

    assert len(model.guarded_tokenizer.encode("four!").ids) == 5
    assert len(encode(model.trusting_tokenizer, "four!")) == 5


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": None},
        {"decoder": {"type": "Fuse"}},
    ],
)
def test_no_least_number_of_tokens_is_assumed_where_text_can_shrink(
    tmp_path: Path, load: Load, change: Json
) -> None:
    model = load(write_model(tmp_path, bytes_tokenizer() | change))

    assert model.length_bound is None
