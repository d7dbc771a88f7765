"""What a client asks of the scheduler in headers, beside the body that OpenAI defines."""

from starlette.datastructures import Headers

from mesh.errors import InvalidRequest

TTFT_OBJECTIVE = "x-pdmesh-ttft-objective-ms"
_MAX_MS = 2**32 - 1


def ttft_objective_ms(headers: Headers) -> int:
    """Within how many milliseconds the first token is wanted; 0 where the client does not say."""
    given = headers.get(TTFT_OBJECTIVE)
    if given is None:
        return 0
    if not (given.isascii() and given.isdigit() and 0 < int(given[:11]) <= _MAX_MS):
        raise InvalidRequest(
            f"{TTFT_OBJECTIVE} must be a whole number of milliseconds, at least 1",
            param=TTFT_OBJECTIVE,
        )
    return int(given)
