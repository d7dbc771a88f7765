"""Scanner and editor: valid is what the parser takes, and untouched bytes stay."""

import json
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.body import parse_object
from gateway.rules.document import Document
from gateway.rules.scanner import MAX_INTEGER_DIGITS, find_problem, outline, skip_value
from mesh.errors import InvalidRequest
from tests.rules.bodies import BODIES, VALUES, broken_bodies


@settings(max_examples=300)
@given(st.one_of(BODIES, broken_bodies(), st.binary(max_size=20)))
@example(b'{"a":"\\ud800\\udc00 \\\\ud800"}')
@example(b'{"a":"\\ud800\\ud800\\udc00"}')
@example(b'{"a":-}')
@example(b'{"a":[1,2,]}')
@example(b'{"a":1e400}')
@example(b'{"a":' + b"1" * 4301 + b"}")
@example(b'{"a":-' + b"1" * 4300 + b"}")
def test_scanner_finds_a_problem_exactly_where_the_parser_refuses(body: bytes) -> None:
    try:
        parse_object(body)
    except InvalidRequest:
        assert find_problem(body) is not None
    else:
        assert find_problem(body) is None


# GW-08, GW-10
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "the body is empty"),
        (b"[1]", "the body should be a JSON object"),
        (b" null", "the body should be a JSON object"),
        (b'{"model":"m","messages":[', "the body ends too early at byte offset 25"),
        (b'{"a":"\xff"}', "the body is not valid UTF-8 at byte offset 6"),
        (b'{"a": NaN}', "NaN and Infinity are not JSON numbers at byte offset 6"),
        (b'{"a":-Infinity}', "NaN and Infinity are not JSON numbers at byte offset 5"),
        (b'{"a":0,"\\u0061":1}', "a key occurs twice in one object at byte offset 7"),
        (b"\xef\xbb\xbf{}", "the body begins with a byte order mark"),
        ('{"a":1}'.encode("utf-16-le"), "expected a key at byte offset 1"),
        (b"{} x", "unexpected text after the object at byte offset 3"),
        (b'{"a":"\\ud83d"}', "an unpaired surrogate at byte offset 6"),
        (b'{"a":"x\\ude00"}', "an unpaired surrogate at byte offset 7"),
        (b'{"a":"\n"}', "a control character in a string at byte offset 6"),
        (b'{"a":"\\x41"}', "an unknown escape at byte offset 6"),
        (b'{"a":"b', "a string is not closed at byte offset 5"),
        (b'{"a":1e999}', "a number is too large at byte offset 5"),
        (b'{"a":01}', "expected ',' or '}' at byte offset 6"),
        (b'{"a" 1}', "expected ':' at byte offset 5"),
        (b'{"a":tru}', "expected a value at byte offset 5"),
    ],
)
def test_problem_says_what_and_where(body: bytes, problem: str) -> None:
    assert find_problem(body) == problem


# GW-11
def test_nesting_is_bounded_at_a_hundred_levels() -> None:
    assert find_problem(b'{"a":' + b"[" * 99 + b"]" * 99 + b"}") is None
    assert find_problem(b'{"a":' + b"[" * 100 + b"]" * 100 + b"}") == (
        "the body nests deeper than 100 levels at byte offset 104"
    )


def test_longest_integer_is_the_one_that_python_takes() -> None:
    assert sys.int_info.default_max_str_digits == MAX_INTEGER_DIGITS


@settings(max_examples=120)
@given(VALUES)
def test_a_value_ends_where_its_text_ends(value: str) -> None:
    text = f"[{value} ,".encode()

    assert skip_value(text, outline(text), 1) == 1 + len(value.encode())


@settings(max_examples=120)
@given(BODIES)
def test_opened_body_renders_as_it_was(body: bytes) -> None:
    document = Document(body)
    for member in document.root.members:
        member.open()

    assert document.render() == body


@settings(max_examples=120)
@given(BODIES, st.data())
def test_edits_leave_every_other_member_as_it_was(body: bytes, data: st.DataObject) -> None:
    document = Document(body)
    members = [member.render() for member in document.root.members]
    if not members:
        return
    at = data.draw(st.integers(0, len(members) - 1))
    edited = document.root.members[at]
    how = data.draw(st.sampled_from(["value", "rename", "remove", "insert"]))

    if how == "value":
        edited.value = b"[1]"
    elif how == "rename":
        document.root.rename(edited, "renämed")
    elif how == "remove":
        document.root.remove(edited)
    else:
        document.root.insert("inserted", b"5")

    text = document.render()
    json.loads(text)
    for position, member in enumerate(members):
        # The white space behind the last value moves behind an inserted one.
        is_moved = how == "insert" and position == len(members) - 1
        if position != at or is_moved:
            assert (member.rstrip(b" \t\r\n") if is_moved else member) in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"a":1\n}', b'{"a":1,"z":0\n}'),
        (b"{}", b'{"z":0}'),
        (b" { \n} ", b' { \n"z":0} '),
    ],
)
def test_inserted_member_follows_the_last_value(before: bytes, after: bytes) -> None:
    document = Document(before)

    document.root.insert("z", b"0")

    assert document.render() == after


def test_key_is_found_however_it_is_spelled() -> None:
    root = Document(b'{"temperatur\\u0065":0}').root

    member = root.get("temperature")

    assert member is not None
    assert member.value == b"0"
