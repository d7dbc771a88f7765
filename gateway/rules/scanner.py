"""Where things are in a JSON text: spans for editing, and the first fault with its position.

`deploy/openresty/lua/pdmesh/scanner.lua` is this file in Lua: same faults, same words.
"""

import json
import re

MAX_DEPTH = 100
# Python refuses longer integers; the Lua twin counts the digits.
MAX_INTEGER_DIGITS = 4300
_MAX_EXAMINED_BYTES = 256 * 1024

_WS = rb"[ \t\n\r]*+"

# What stands between two brackets of an outline, whole arrays and objects of two levels included.
_FLAT = rb' *+(?:"[^"]*+" *+)*+'
_NESTED = _FLAT + rb"(?:\[" + _FLAT + rb"\]" + _FLAT + rb")*+"
_TO_BRACKET = re.compile(_NESTED + rb"(?:\[" + _NESTED + rb"\]" + _NESTED + rb")*+")
_OUTLINE = bytes(
    ord("[") if byte in b"[{" else ord("]") if byte in b"]}" else byte if byte == 0x22 else 0x20
    for byte in range(256)
)

_SPACE = re.compile(_WS)
_SKIP_SCALAR = re.compile(rb"[^ \t\n\r,\]}]++")

_PLAIN = rb'[^"\\\x00-\x1f]*+'
_STRING = re.compile(
    rb'"' + _PLAIN + rb'(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})' + _PLAIN + rb')*+"', re.DOTALL
)
_STRING_PART = re.compile(rb"(?:" + _PLAIN + rb'(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))?+)*+')
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?")
_WORD = re.compile(rb"true|false|null")
_NOT_NUMBER = re.compile(rb"NaN|-?Infinity")
# Elements that cannot be at fault, taken together so that long arrays cost no loop.
_PLAIN_ELEMENTS = re.compile(
    rb"(?:" + _WS + rb'(?:"' + _PLAIN + rb'"|-?(?:0|[1-9][0-9]{0,300}+)(?:\.[0-9]++)?+'
    rb"(?![0-9.eE])|true|false|null)" + _WS + rb",)*+"
)
_SURROGATE = re.compile(rb"\\(?:u(d[89ab][0-9a-f]{2})(\\ud[c-f][0-9a-f]{2})?|.)", re.I | re.DOTALL)
_LOW_SURROGATE = re.compile(rb"ud[c-f][0-9a-f]{2}", re.I)


def outline(text: bytes) -> bytes:
    """Valid JSON, byte for byte, with nothing left but quotes and brackets, the latter all square.

    Brackets inside strings stay; escaped quotes do not. Finding the end of a value in it is
    a matter of a few fast searches, however long the value is.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    return text.translate(_OUTLINE)


def skip_space(text: bytes, at: int) -> int:
    """The first position from `at` on that is not white space."""
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def skip_string(outlined: bytes, at: int) -> int:
    """The end of the string that begins at `at`."""
    return outlined.index(b'"', at + 1) + 1


def skip_value(text: bytes, outlined: bytes, at: int) -> int:
    """The end of the value that begins at `at` in valid JSON."""
    first = outlined[at]
    if first == 0x22:
        return skip_string(outlined, at)
    if first == 0x20:
        return _SKIP_SCALAR.match(text, at).end()  # type: ignore[union-attr]
    depth = 0
    while True:
        depth += 1 if outlined[at] == 0x5B else -1
        at += 1
        if depth == 0:
            return at
        at = _TO_BRACKET.match(outlined, at).end()  # type: ignore[union-attr]


def decode_string(token: bytes) -> str:
    """What a string token says: `"temperatur\\u0065"` is `temperature`."""
    if b"\\" not in token:
        return token[1:-1].decode()
    decoded = json.loads(token)
    assert isinstance(decoded, str)
    return decoded


def find_problem(body: bytes) -> str | None:
    """The first fault of a body that should be a JSON object; None when there is none.

    For bodies that a faster parser has refused. A very long one is not gone through.
    """
    if not body:
        return "the body is empty"
    if len(body) > _MAX_EXAMINED_BYTES:
        return "the body is not valid JSON"
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"the body is not valid UTF-8 at byte offset {error.start}"
    if body.startswith(b"\xef\xbb\xbf"):
        return "the body begins with a byte order mark"
    at = skip_space(body, 0)
    if body[at : at + 1] != b"{":
        return "the body should be a JSON object"
    try:
        at = skip_space(body, _check_object(body, at, 1))
    except _Fault as fault:
        return fault.text
    return None if at == len(body) else f"unexpected text after the object at byte offset {at}"


class _Fault(Exception):
    def __init__(self, text: str, at: int) -> None:
        self.text = f"{text} at byte offset {at}"
        super().__init__(self.text)


def _check_object(text: bytes, at: int, depth: int) -> int:
    keys: set[str] = set()
    at = skip_space(text, at + 1)
    if text[at : at + 1] == b"}":
        return at + 1
    while True:
        if text[at : at + 1] != b'"':
            raise _expected("a key", text, at)
        end = _check_string(text, at)
        key = decode_string(text[at:end])
        if key in keys:
            raise _Fault("a key occurs twice in one object", at)
        keys.add(key)
        at = skip_space(text, end)
        if text[at : at + 1] != b":":
            raise _expected("':'", text, at)
        at = skip_space(text, _check_value(text, skip_space(text, at + 1), depth))
        mark = text[at : at + 1]
        if mark == b"}":
            return at + 1
        if mark != b",":
            raise _expected("',' or '}'", text, at)
        at = skip_space(text, at + 1)


def _check_array(text: bytes, at: int, depth: int) -> int:
    at = skip_space(text, at + 1)
    if text[at : at + 1] == b"]":
        return at + 1
    while True:
        at = skip_space(text, _PLAIN_ELEMENTS.match(text, at).end())  # type: ignore[union-attr]
        at = skip_space(text, _check_value(text, at, depth))
        mark = text[at : at + 1]
        if mark == b"]":
            return at + 1
        if mark != b",":
            raise _expected("',' or ']'", text, at)
        at += 1


def _check_value(text: bytes, at: int, depth: int) -> int:
    first = text[at : at + 1]
    if first == b'"':
        return _check_string(text, at)
    if first in (b"{", b"["):
        if depth == MAX_DEPTH:
            raise _Fault(f"the body nests deeper than {MAX_DEPTH} levels", at)
        check = _check_object if first == b"{" else _check_array
        return check(text, at, depth + 1)
    if (word := _WORD.match(text, at)) is not None:
        return word.end()
    if _NOT_NUMBER.match(text, at) is not None:
        raise _Fault("NaN and Infinity are not JSON numbers", at)
    if (number := _NUMBER.match(text, at)) is None:
        raise _expected("a value", text, at)
    if _is_too_large(number.group()):
        raise _Fault("a number is too large", at)
    return number.end()


def _check_string(text: bytes, at: int) -> int:
    match = _STRING.match(text, at)
    if match is None:
        end = _STRING_PART.match(text, at + 1).end()  # type: ignore[union-attr]
        if end == len(text):
            raise _Fault("a string is not closed", at)
        what = "an unknown escape" if text[end] == ord("\\") else "a control character in a string"
        raise _Fault(what, end)
    token = match.group()
    if b"\\" in token:
        for escape in _SURROGATE.finditer(token):
            high, low = escape.groups()
            if (high is not None and low is None) or (
                high is None and _LOW_SURROGATE.match(token, escape.start() + 1) is not None
            ):
                raise _Fault("an unpaired surrogate", at + escape.start())
    return match.end()


def _is_too_large(number: bytes) -> bool:
    digits = number.lstrip(b"-")
    if digits.isdigit():
        return len(digits) > MAX_INTEGER_DIGITS
    return float(number) in (float("inf"), float("-inf"))


def _expected(what: str, text: bytes, at: int) -> _Fault:
    if at >= len(text):
        return _Fault("the body ends too early", at)
    return _Fault(f"expected {what}", at)
