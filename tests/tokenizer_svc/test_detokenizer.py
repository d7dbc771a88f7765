import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.text.token_bytes import UnknownToken
from tests.tokenizer_svc.synthetic import (
    bytes_tokenizer,
    encode,
    id_of,
    sentencepiece_tokenizer,
    vocabulary_of,
)
from tokenizer_svc.detokenizer import make_detokenizer
from tokenizer_svc.models import TokenizerModel
from tokenizer_svc.vocabulary import Vocabulary

EMOJI = "A👩‍🚀 🌶️ ďábel 你好"


BYTES, BYTES_VOCABULARY = vocabulary_of(bytes_tokenizer())
PIECES, PIECES_VOCABULARY = vocabulary_of(sentencepiece_tokenizer())


def stream(
    vocabulary: Vocabulary,
    token_ids: Sequence[int],
    prompt: Sequence[int] = (),
    *,
    skip_special_tokens: bool = False,
) -> list[str]:
    """The deltas of a sequence, one for each token and one for the end."""
    detokenizer = make_detokenizer(vocabulary, prompt, skip_special_tokens=skip_special_tokens)
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


# TK-01
def test_characters_split_over_tokens_come_whole(smollm2: TokenizerModel) -> None:
    token_ids = encode(smollm2.trusting_tokenizer, EMOJI)
    assert any(
        len(smollm2.vocabulary.token_bytes[i].decode("utf-8", "ignore")) == 0 for i in token_ids
    )  # some tokens are parts of characters

    deltas = stream(smollm2.vocabulary, token_ids)

    assert "".join(deltas) == EMOJI
    assert not any("\ufffd" in delta for delta in deltas)


@given(st.text())
def test_any_text_comes_back_from_single_bytes_without_replacement_characters(text: str) -> None:
    deltas = stream(BYTES_VOCABULARY, encode(BYTES, text))

    assert "".join(deltas) == text
    assert all("\ufffd" not in delta or "\ufffd" in text for delta in deltas)


@given(st.lists(st.integers(0, 257), max_size=30), st.booleans())
def test_any_ids_even_invalid_utf8_give_the_text_of_the_whole(
    token_ids: list[int], skip_special_tokens: bool
) -> None:
    deltas = stream(BYTES_VOCABULARY, token_ids, skip_special_tokens=skip_special_tokens)

    assert "".join(deltas) == BYTES.decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_random_ids_of_the_real_vocabulary_give_the_text_of_the_whole(
    smollm2: TokenizerModel,
) -> None:
    vocabulary = smollm2.vocabulary
    choose = random.Random(7)
    partial = [i for i, data in enumerate(vocabulary.token_bytes) if max(data) > 0x7F]
    for _ in range(300):
        token_ids = choose.choices(partial, k=20) + choose.choices(range(vocabulary.size), k=5)
        choose.shuffle(token_ids)

        deltas = stream(vocabulary, token_ids)

        expected = smollm2.trusting_tokenizer.decode(token_ids, skip_special_tokens=False)
        assert (
            "".join(deltas) == expected == vocabulary.decode(token_ids, skip_special_tokens=False)
        )


# TK-03
@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("🌶".encode()[-1:] + b" hot", "🌶 hot"),
        (b" hot", " hot"),
        ("é".encode(), "é"),
        (b"", ""),
        (b"\xb6\xb6x", "🌶\ufffdx"),
    ],
)
def test_a_prompt_that_ends_inside_a_character_never_leaks(output: bytes, expected: str) -> None:
    prompt = encode(BYTES, "Hello 🌶")[:-1]
    one_byte = {data: i for i, data in enumerate(BYTES_VOCABULARY.token_bytes)}

    deltas = stream(BYTES_VOCABULARY, [one_byte[bytes([b])] for b in output], prompt)

    assert "".join(deltas) == expected


# TK-03
def test_the_prompts_partial_character_is_completed_by_the_real_vocabulary(
    smollm2: TokenizerModel,
) -> None:
    whole = encode(smollm2.trusting_tokenizer, "Hello 🌶 world")
    cut = next(
        i
        for i in range(len(whole))
        if smollm2.vocabulary.decode(whole[:i], skip_special_tokens=False).endswith("\ufffd")
    )

    text = "".join(stream(smollm2.vocabulary, whole[cut:], whole[:cut]))

    assert text == "🌶 world"


# TK-05
@pytest.mark.parametrize(
    "text",
    ["  two leading", "a , b . c ! it 's", "    .", "\n\n\tx", "trailing   ", " ", "don 't", "​"],
)
def test_spaces_are_neither_lost_nor_tidied(smollm2: TokenizerModel, text: str) -> None:
    token_ids = encode(smollm2.trusting_tokenizer, text)

    assert "".join(stream(smollm2.vocabulary, token_ids)) == text


# TK-06
def test_control_tokens_are_shown_or_skipped_without_spaces_around_them(
    smollm2: TokenizerModel,
) -> None:
    tokenizer = smollm2.trusting_tokenizer
    token_ids = encode(tokenizer, "<|im_start|>a<|im_end|>b")
    assert len(token_ids) == 4

    for skip, expected in ((False, "<|im_start|>a<|im_end|>b"), (True, "ab")):
        streamed = stream(smollm2.vocabulary, token_ids, skip_special_tokens=skip)

        assert "".join(streamed) == expected
        assert smollm2.vocabulary.decode(token_ids, skip_special_tokens=skip) == expected
        assert tokenizer.decode(token_ids, skip_special_tokens=skip) == expected


def test_ids_without_a_token_stand_for_no_text_and_others_are_refused() -> None:
    _, vocabulary = vocabulary_of(bytes_tokenizer(), size=300)

    assert stream(vocabulary, [299, 270]) == ["", "", ""]
    vocabulary.check([0, 299])
    with pytest.raises(UnknownToken, match="token id 300 is outside the vocabulary of 300"):
        vocabulary.check([0, 300])


@given(st.text("Helo wrd!,12é🌶", max_size=20))
def test_sentencepiece_deltas_join_to_the_text_of_the_whole(text: str) -> None:
    token_ids = encode(PIECES, text)

    deltas = stream(PIECES_VOCABULARY, token_ids)

    assert "".join(deltas) == PIECES.decode(token_ids)
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_sentencepiece_word_after_a_prompt_keeps_its_space() -> None:
    prompt = encode(PIECES, "Hello")
    output = encode(PIECES, "Hello world")[len(prompt) :]

    assert "".join(stream(PIECES_VOCABULARY, output, prompt)) == " world"


def test_skipped_control_tokens_do_not_cost_a_sentencepiece_word_its_space() -> None:
    token_ids = [*encode(PIECES, "Hello"), 2, *encode(PIECES, "world")]

    assert "".join(stream(PIECES_VOCABULARY, token_ids, skip_special_tokens=True)) == "Hello world"


def test_a_run_of_invalid_sentencepiece_bytes_does_not_grow_without_bound() -> None:
    invalid = id_of(PIECES, "<0xFF>")

    deltas = stream(PIECES_VOCABULARY, [invalid] * 100)

    assert "".join(deltas) == "\ufffd" * 100
    assert max(map(len, deltas)) <= 8


def test_token_bytes_read_as_the_tokens_do_inside_a_text() -> None:
    table = PIECES_VOCABULARY.token_bytes

    assert table[id_of(PIECES, "▁wor")] == b" wor"
    assert table[id_of(PIECES, "<0xF0>")] == b"\xf0"
    assert table[id_of(PIECES, "</s>")] == b"</s>"
