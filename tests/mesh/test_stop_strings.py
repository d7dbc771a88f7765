import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.text.stop_strings import Scanned, StopScanner, StopStrings

# Few letters, so that matches, overlaps and false starts are common.
TEXTS = st.text("abc", max_size=20)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def scan(
    stops: list[str], pieces: list[str], *, include_stop: bool = False
) -> tuple[list[str], str | None]:
    """The deltas of a text that comes in pieces, and the stop string that ended it."""
    scanner = StopScanner(StopStrings(stops), include_stop=include_stop)
    deltas: list[str] = []
    for piece in pieces:
        scanned = scanner.push(piece)
        deltas.append(scanned.text)
        if scanned.matched_stop is not None:
            return deltas, scanned.matched_stop
    return [*deltas, scanner.flush()], None


def cut_at_first_stop(stops: list[str], text: str, include_stop: bool) -> tuple[str, str | None]:
    """The same by looking at the whole text, one end after the other."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


# TK-13
def test_a_stop_string_split_over_tokens_is_found_and_no_prefix_of_it_leaks() -> None:
    deltas, matched = scan(["beta gamma"], ["alpha", " be", "ta gam", "ma delta"])

    assert "".join(deltas) == "alpha "
    assert matched == "beta gamma"
    assert deltas == ["alpha", " ", "", ""]


# TK-14
@pytest.mark.parametrize(
    ("stop", "pieces"),
    [("DEFG", ["abc ", "DEF"]), ("<|end|>", ["x", "<", "|"])],
)
def test_held_text_is_released_when_the_stop_string_never_completes(
    stop: str, pieces: list[str]
) -> None:
    deltas, matched = scan([stop], pieces)

    assert "".join(deltas) == "".join(pieces)
    assert matched is None


def test_only_what_could_still_become_a_stop_string_is_held_back() -> None:
    deltas, _ = scan(["abcdefgh"], ["xyzab", "cx"])

    assert deltas == ["xyz", "abcx", ""]


def test_the_match_that_is_complete_first_wins_whatever_the_order_of_the_stop_strings() -> None:
    for stops in (["gamma", "beta"], ["beta", "gamma"]):
        deltas, matched = scan(stops, ["alpha beta gamma"])

        assert "".join(deltas) == "alpha "
        assert matched == "beta"


def test_of_matches_that_end_together_the_longest_wins() -> None:
    deltas, matched = scan(["b", "ab"], ["xab"])

    assert ("".join(deltas), matched) == ("x", "ab")


def test_an_included_stop_string_ends_the_text_and_nothing_is_held() -> None:
    deltas, matched = scan(["END"], ["aE", "N", "D tail"], include_stop=True)

    assert deltas == ["aE", "N", "D"]
    assert matched == "END"


def test_a_match_that_does_not_count_yet_holds_nothing_back() -> None:
    scanner = StopScanner(StopStrings(["ab"]), include_stop=False)

    assert scanner.push("xab", may_match=False) == Scanned("xab")
    assert scanner.push("b") == Scanned("b")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""])


@given(stops=STOPS, pieces=st.lists(TEXTS, max_size=6), include_stop=st.booleans())
def test_the_streamed_text_is_that_of_the_whole_however_it_is_cut(
    stops: list[str], pieces: list[str], include_stop: bool
) -> None:
    deltas, matched = scan(stops, pieces, include_stop=include_stop)

    expected = cut_at_first_stop(stops, "".join(pieces), include_stop)
    assert ("".join(deltas), matched) == expected


@given(stops=STOPS, text=TEXTS)
def test_held_back_is_exactly_the_longest_end_that_is_a_proper_prefix_of_a_stop(
    stops: list[str], text: str
) -> None:
    scanner = StopScanner(StopStrings(stops), include_stop=False)
    scanned = scanner.push(text)
    if scanned.matched_stop is not None:
        return

    proper_prefixes = {stop[:i] for stop in stops for i in range(len(stop))}
    held = max((p for p in proper_prefixes if text.endswith(p)), key=len)
    assert scanner.flush() == held
    assert scanned.text + held == text
