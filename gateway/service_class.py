"""What a client asks of the scheduler beside what OpenAI's bodies define."""

import re

from starlette.datastructures import Headers

from gateway.generation import PriorityClass
from mesh.errors import InvalidRequest
from mesh.v1 import types_pb2

TTFT_OBJECTIVE = "x-pdmesh-ttft-objective-ms"
_MAX_MS = 2**32 - 1
_MS = re.compile(r"[0-9]{1,10}")

# Keys are what is on the wire, where callers may send any number.
_CLASSES: dict[int, PriorityClass] = {
    types_pb2.PRIORITY_CLASS_UNSPECIFIED: PriorityClass.ONLINE,
    types_pb2.PRIORITY_CLASS_ONLINE: PriorityClass.ONLINE,
    types_pb2.PRIORITY_CLASS_OFFLINE: PriorityClass.OFFLINE,
}


def ttft_objective_ms(headers: Headers) -> int:
    """Within how many milliseconds the first token is wanted; 0 where the client does not say."""
    given = headers.get(TTFT_OBJECTIVE)
    if given is None:
        return 0
    if _MS.fullmatch(given) is None or not 0 < int(given) <= _MAX_MS:
        raise InvalidRequest(
            f"{TTFT_OBJECTIVE} must be a whole number of milliseconds, at least 1",
            param=TTFT_OBJECTIVE,
        )
    return int(given)


def priority_class(given: int) -> PriorityClass:
    """Of a `mesh.v1.PriorityClass`."""
    try:
        return _CLASSES[given]
    except KeyError:
        raise InvalidRequest(f"priority_class {given} is not one", param="priority_class") from None
