"""Hypothesis strategies for bodies as odd as clients can write them."""

import json

from hypothesis import strategies as st

# What is no JSON, or JSON that two parsers could read in two ways.
MALFORMED = [
    b'{"model":"m","messages":[',
    b'{"model":"\xff"}',
    b'{"temperature":NaN}',
    b'{"temperature":Infinity}',
    b'{"temperature":-Infinity}',
    b'{"temperature":1e999}',
    b'{"temperature":0,"temperature":1}',
    b'{"metadata":{"a":1,"a":1}}',
    b'\xef\xbb\xbf{"model":"m"}',
    '{"model":"m"}'.encode("utf-16-le"),
    '{"model":"m"}'.encode("utf-16"),
    b'{"model":"m"} x',
    b'{"model":"\\ud800"}',
    b'{"\\udc00":1}',
    b'{"seed":' + b"1" * 5000 + b"}",
    b"{'model':1}",
    b'{"model":"a\nb"}',
]

SPACE = st.sampled_from(["", "", "", "", " ", "\n", "\t", "\r\n", "  \n\t"])

NUMBERS = st.one_of(
    st.sampled_from(
        [
            *("0", "-0", "0.0", "-0.0", "0e0", "1", "1.0", "1.50", "1E2", "1e+2", "1e-7"),
            *("8", "8.0", "0.7", "0.70", "2", "-1", "100", "4096", "5000", "1e308", "5e-324"),
            *("9007199254740993", "9223372036854775807", "18446744073709551616", "1e-999"),
            *("1234567890123456", "0.1000000000000000055511151231257827"),
            "123456789012345678901234567890",
        ]
    ),
    st.integers(-(10**6), 10**6).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda number: json.dumps(number)),
)

_CHARACTERS = st.characters(codec="utf-8")
_SHORT = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\b": "\\b", "\f": "\\f", "\n": "\\n"}


@st.composite
def _character(draw: st.DrawFn) -> str:
    """One character of a string token, raw or escaped in some way."""
    character = draw(st.one_of(st.sampled_from('aé"\\/\n{}[],:*. 中😀\u2028\x7f'), _CHARACTERS))
    spelling = draw(st.integers(0, 3))
    if spelling == 0 and character in _SHORT:
        return _SHORT[character]
    if spelling == 1 or character in '"\\' or character < " ":
        return escaped(character, upper=draw(st.booleans()))
    return character


def escaped(character: str, *, upper: bool = False) -> str:
    """The character as `\\uXXXX`, a pair of them beyond the first plane."""
    units = character.encode("utf-16-be")
    pairs = (units[at : at + 2].hex() for at in range(0, len(units), 2))
    return "".join("\\u" + (pair.upper() if upper else pair) for pair in pairs)


STRINGS = st.lists(_character(), max_size=8).map(lambda parts: f'"{"".join(parts)}"')
MODELS = st.sampled_from(
    ['"smol"', '"gpt-4o"', '"gpt-4o-mini"', '"\\u0073mol"', '"org/model"', '""', "null", "5"]
)
SCALARS = st.one_of(NUMBERS, STRINGS, st.sampled_from(["true", "false", "null", '""', "[]", "{}"]))


def _array(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    parts = st.lists(st.tuples(SPACE, values, SPACE).map("".join), max_size=4)
    return st.builds(
        lambda inside, blank: f"[{','.join(inside)}]" if inside else f"[{blank}]", parts, SPACE
    )


KEYS = st.one_of(
    st.sampled_from(["a", "b", "x", "k", "secret", "include_usage", "role", "tenant", "a.b"]),
    st.text(_CHARACTERS, max_size=4),
)


@st.composite
def _key_token(draw: st.DrawFn, key: str) -> str:
    spelled = json.dumps(key, ensure_ascii=False)
    if key and draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(key) - 1))
        before, after = json.dumps(key[:at], ensure_ascii=False), json.dumps(key[at + 1 :])
        spelled = before[:-1] + escaped(key[at]) + after[1:]
    return spelled


@st.composite
def objects(draw: st.DrawFn, members: st.SearchStrategy[list[tuple[str, str]]]) -> str:
    parts = []
    for key, value in draw(members):
        spaces = draw(st.tuples(SPACE, SPACE, SPACE, SPACE))
        token = draw(_key_token(key))
        parts.append(f"{spaces[0]}{token}{spaces[1]}:{spaces[2]}{value}{spaces[3]}")
    return "{" + (",".join(parts) if parts else draw(SPACE)) + "}"


def _object(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return objects(
        st.lists(st.tuples(KEYS, values), max_size=4, unique_by=lambda member: member[0])
    )


VALUES = st.recursive(SCALARS, lambda inner: st.one_of(_array(inner), _object(inner)), max_leaves=8)

_MESSAGES = st.sampled_from(
    [
        '[{"role":"user","content":"hi"}]',
        '[ {"role" : "system", "content" : [ ]} , {"role":"us\\u0065r","content":"\\ud83d\\ude00"}'
        "]",
        '[{"role":"user","content":[{"type":"text","text":"a \\"b\\" {[,"}]}]',
        "[]",
        "null",
    ]
)
_KNOWN = {
    "model": MODELS,
    "messages": _MESSAGES,
    "stream_options": st.one_of(_object(SCALARS), SCALARS),
    "metadata": st.one_of(_object(VALUES), SCALARS),
    "logit_bias": st.one_of(st.just("{}"), st.just('{"5": -1.50}'), SCALARS),
    "stop": st.one_of(st.sampled_from(['"\\n"', '["a","b"]', "[]", '""']), SCALARS),
    "x": VALUES,
} | {
    name: st.one_of(NUMBERS, SCALARS)
    for name in (
        "temperature",
        "top_p",
        "max_tokens",
        "max_completion_tokens",
        "stop_sequences",
        "seed",
        "n",
        "stream",
        "user",
        "old_name",
        "new_name",
        "tools",
    )
}


@st.composite
def _members(draw: st.DrawFn) -> list[tuple[str, str]]:
    names = draw(st.lists(st.sampled_from(sorted(_KNOWN)), unique=True, max_size=10))
    members = [(name, draw(_KNOWN[name])) for name in names]
    others = draw(st.lists(st.tuples(KEYS, VALUES), max_size=2, unique_by=lambda one: one[0]))
    members += [(key, value) for key, value in others if key not in names]
    return draw(st.permutations(members))


BODIES = st.tuples(SPACE, objects(_members()), SPACE).map(lambda parts: "".join(parts).encode())


@st.composite
def long_bodies(draw: st.DrawFn, num_bytes: int) -> bytes:
    """A body whose length is about `num_bytes`, often just that."""
    body = draw(BODIES)
    off_by = draw(st.sampled_from([-1, 0, 1, 100]))
    return body + b" " * max(0, num_bytes + off_by - len(body))


@st.composite
def broken_bodies(draw: st.DrawFn) -> bytes:
    """A body with one thing changed, which often makes it invalid."""
    body = draw(BODIES)
    at = draw(st.integers(0, len(body)))
    how = draw(st.integers(0, 4))
    piece = draw(
        st.sampled_from(
            [
                *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\xff", b"\xc3", b"\x00"),
                *(b"NaN", b"-Infinity", b"01", b"1.", b".5", b"-", b"+1", b"1e999", b"tru"),
                *(b"\\ud800", b'"\\udc00"', b'"a":1,"a":2,', b"\xef\xbb\xbf", b"\xed\xa0\x80"),
                *(b"[" * 120, b"9" * 4301, b"//", b"'", b" x", b"\\x41", b"\xf4\x90\x80\x80"),
                b"\xc0\x80",
            ]
        )
    )
    if how == 0:
        return body[:at]
    if how == 1:
        return body[:at] + body[at + 1 :]
    if how == 2:
        return body + piece
    if how == 3:
        return draw(VALUES).encode()
    return body[:at] + piece + body[at:]
