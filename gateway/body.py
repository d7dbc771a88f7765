"""Request bodies: bounded, and JSON without the parts on which parsers disagree."""

import asyncio
import json
import math
import re
from array import array
from itertools import accumulate
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from gateway.errors import BodyTooLarge, BodyTooSlow, UnsupportedMediaType
from mesh import metrics
from mesh.errors import InvalidRequest

MAX_DEPTH = 100

_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json", re.IGNORECASE)
_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([^\s;\"]+)", re.IGNORECASE)
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# Down one level and up again, as signed bytes.
_BRACKET_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(headers: Headers, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body; refused before it is read when it announces too much."""
    _check_media_type(headers)
    announced = headers.get("content-length")
    if announced is not None and announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_parts(receive, max_bytes)
    except TimeoutError:
        metrics.REFUSALS.add(1, {"reason": "slow_body"})
        raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s") from None


async def _read_parts(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; anything that two parsers could read in two ways is refused."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8: {error}") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_float=_finite,
            parse_constant=_refuse_constant,
        )
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise InvalidRequest(f"the body holds a number that is too long: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body should be a JSON object")
    if _is_deeper_than(body, MAX_DEPTH):
        raise _too_deep()
    if _SURROGATE.search(body) is not None and _has_lone_surrogate(value):
        raise InvalidRequest("the body holds an unpaired surrogate (\\ud800 to \\udfff)")
    return value


def _check_media_type(headers: Headers) -> None:
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("compressed bodies are not supported")
    content_type = headers.get("content-type")
    if content_type is None:
        return
    charset = _CHARSET.search(content_type)
    if not _JSON_TYPE.match(content_type.strip()):
        raise UnsupportedMediaType("the Content-Type should be application/json")
    if charset is not None and charset.group(1).lower() not in ("utf-8", "utf8"):
        raise UnsupportedMediaType("the body should be UTF-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidRequest(f"the key {name[:100]!r} occurs twice in one object")
            seen.add(name)
    return made


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise InvalidRequest(f"{digits[:40]} is too large for a number")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"{name} is not a JSON number")


def _is_deeper_than(body: bytes, max_depth: int) -> bool:
    """Whether valid JSON nests deeper, in one pass without a Python loop over its bytes."""
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return False
    steps = _STRING.sub(b"", body).translate(_BRACKET_STEPS, _NOT_BRACKETS)
    return max(accumulate(array("b", steps)), default=0) > max_depth


def _has_lone_surrogate(value: dict[str, Any]) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body exceeds the limit of {max_bytes} bytes")


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"the body nests deeper than {MAX_DEPTH} levels")
