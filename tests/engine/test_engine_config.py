"""Reading config.json: what the engine runs, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig, ModelConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def read(folder: Path, generation: dict[str, Any] | None = None, **values: Any) -> ModelConfig:
    config = {key: value for key, value in {**LLAMA, **values}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def test_llama_defaults_fill_what_old_configs_leave_out(tmp_path: Path) -> None:
    config = read(tmp_path, num_key_value_heads="absent", rms_norm_eps="absent")

    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-6
    assert config.rope_theta == 10000.0
    assert config.rope_scaling is None
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
    ],
)
def test_old_and_new_spellings_of_rope_mean_the_same(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = read(tmp_path, **rope)

    assert config.rope_theta == 5e5
    assert config.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 128)


def test_linear_rope_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, rope_scaling={"type": "linear", "factor": 2})

    assert config.rope_scaling == LinearRopeScaling(2.0)


@pytest.mark.parametrize(
    ("values", "generation", "expected"),
    [
        ({}, None, {2}),
        ({"eos_token_id": [2, 5]}, None, {2, 5}),
        ({"eos_token_id": 2}, {"eos_token_id": [3, 4]}, {3, 4}),
        ({"eos_token_id": 2}, {"bos_token_id": 1}, {2}),
        ({"eos_token_id": None}, None, set()),
    ],
)
def test_generation_config_has_the_last_word_on_eos(
    tmp_path: Path, values: dict[str, Any], generation: dict[str, Any] | None, expected: set[int]
) -> None:
    assert read(tmp_path, generation, **values).eos_token_ids == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [({"sliding_window": None}, None), ({"sliding_window": 7}, 7), ({}, 4096)],
)
def test_mistral_has_a_window_unless_it_says_null(
    tmp_path: Path, values: dict[str, Any], expected: int | None
) -> None:
    config = read(tmp_path, architectures=["MistralForCausalLM"], **values)

    assert config.sliding_window == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*is not supported"),
        ({"architectures": "absent"}, "architecture .* is not supported"),
        # ML-06
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is None"),
        ({"rope_scaling": [1]}, "rope_scaling is not an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"eos_token_id": 100}, "eos_token_id 100 is outside the vocabulary of 100"),
        ({"eos_token_id": [2, -1]}, "eos_token_id -1 is outside"),
        ({"bos_token_id": "x"}, "bos_token_id 'x' is outside"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_with_file_and_key(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=message) as caught:
        read(tmp_path, **values)

    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("text", [None, "", "[]", "{"])
def test_an_unreadable_config_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)

    with pytest.raises(ModelConfigError, match=r"config.json"):
        ModelConfig.from_folder(tmp_path)


def test_the_default_model_is_what_its_card_says(smollm2_path: Path) -> None:
    config = ModelConfig.from_folder(smollm2_path)

    assert (config.hidden_size, config.num_layers, config.intermediate_size) == (576, 30, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert (config.rope_theta, config.rms_norm_eps) == (100000.0, 1e-5)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == {2}
