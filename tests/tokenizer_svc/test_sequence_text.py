import codecs
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mesh.text.sequence_text import SequenceText, TextDelta
from mesh.text.stop_strings import StopScanner, StopStrings
from tests.tokenizer_svc.synthetic import bytes_tokenizer, encode, id_of, vocabulary_of
from tokenizer_svc.detokenizer import make_detokenizer

BYTES, BYTES_VOCABULARY = vocabulary_of(bytes_tokenizer())
END_OF_SEQUENCE = id_of(BYTES, "<|im_end|>")


def sequence(stops: list[str], *, min_tokens: int = 0, include_stop: bool = False) -> SequenceText:
    scanner = StopScanner(StopStrings(stops), include_stop=include_stop) if stops else None
    detokenizer = make_detokenizer(BYTES_VOCABULARY, [], skip_special_tokens=True)
    return SequenceText(detokenizer, scanner, min_tokens=min_tokens)


def run(text: SequenceText, groups: list[list[int]], *, stop_token: bool = False) -> TextDelta:
    """Append groups of tokens, the last as the last; what they gave together."""
    joined = ""
    delta = TextDelta("", None, 0)
    for i, group in enumerate(groups):
        is_last = i == len(groups) - 1
        delta = text.append(group, is_last=is_last, ends_with_stop_token=is_last and stop_token)
        joined += delta.text
        if delta.matched_stop is not None:
            break
    return TextDelta(joined, delta.matched_stop, delta.num_tokens)


# TK-14
def test_an_end_token_releases_held_text_and_adds_none() -> None:
    groups = [encode(BYTES, "abc "), encode(BYTES, "DEF"), [END_OF_SEQUENCE]]

    result = run(sequence(["DEFG"]), groups, stop_token=True)

    assert result == TextDelta("abc DEF", None, 8)


# TK-17
def test_tokens_are_counted_up_to_the_one_that_completed_the_match() -> None:
    result = run(sequence(["two"]), [encode(BYTES, "one two three")])

    assert result == TextDelta("one ", "two", len("one two"))


def test_the_token_that_completes_a_character_completes_the_match() -> None:
    result = run(sequence(["🌶"]), [encode(BYTES, "a🌶b")])

    assert result == TextDelta("a", "🌶", 5)


def test_a_stop_token_is_no_text_even_when_a_stop_string_spells_it() -> None:
    result = run(sequence(["x"]), [encode(BYTES, "ab"), encode(BYTES, "x")], stop_token=True)

    assert result == TextDelta("ab", None, 3)


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    result = run(sequence([]), [encode(BYTES, "a🌶")[:-1]])

    assert result == TextDelta("a\ufffd", None, 4)


def test_no_stop_string_matches_before_min_tokens_exist() -> None:
    token_ids = encode(BYTES, "ab ab ab")

    results = [run(sequence(["ab"], min_tokens=n), [token_ids]) for n in (0, 2, 3, 5, 6, 9)]

    assert [result.num_tokens for result in results] == [2, 2, 5, 5, 8, 8]
    assert results[2].text == "ab "
    assert results[-1] == TextDelta("ab ab ab", None, 8)


def complete_text(token_ids: list[int]) -> str:
    """Whole characters only, from scratch."""
    kept = BYTES_VOCABULARY.without_specials(token_ids)
    data = b"".join(BYTES_VOCABULARY.token_bytes[i] for i in kept)
    return codecs.utf_8_decode(data, "replace", False)[0]


def cut_at_first_stop(
    stops: list[str], token_ids: list[int], min_tokens: int, include_stop: bool
) -> TextDelta:
    """The same by decoding every beginning of the sequence, one after the other."""
    for n in range(max(1, min_tokens), len(token_ids) + 1):
        before, text = complete_text(token_ids[: n - 1]), complete_text(token_ids[:n])
        for end in range(len(before) + 1, len(text) + 1):
            ending = [stop for stop in stops if text[:end].endswith(stop)]
            if ending:
                stop = max(ending, key=len)
                return TextDelta(text[: end if include_stop else end - len(stop)], stop, n)
    data = b"".join(
        BYTES_VOCABULARY.token_bytes[i] for i in BYTES_VOCABULARY.without_specials(token_ids)
    )
    return TextDelta(data.decode("utf-8", "replace"), None, len(token_ids))


@given(
    text=st.text("ab é🌶", max_size=25),
    stops=st.lists(st.text("ab é🌶", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 100), max_size=6),
    min_tokens=st.integers(0, 12),
    include_stop=st.booleans(),
)
def test_text_and_count_are_those_of_the_whole_for_every_grouping(
    text: str, stops: list[str], cuts: list[int], min_tokens: int, include_stop: bool
) -> None:
    token_ids = encode(BYTES, text)
    bounds = [0, *sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]
    groups = [token_ids[a:b] for a, b in pairwise(bounds)]

    result = run(sequence(stops, min_tokens=min_tokens, include_stop=include_stop), groups)

    assert result == cut_at_first_stop(stops, token_ids, min_tokens, include_stop)
