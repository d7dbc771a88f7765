"""`python -m tests.fuzz --minutes 10`: look for inputs that break what must hold."""

import argparse
import itertools
import sys
import time
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.inputs import ANY_BODY, CUTS, PAYLOADS
from tests.fuzz.targets import check_body, check_stream

_ROUND = settings(
    max_examples=1000,
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def main() -> None:
    """Rounds of new inputs until the time is over; a failure prints its input and ends."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    arguments = parser.parse_args()
    ends_at = time.monotonic() + arguments.minutes * 60
    num_inputs = 0

    for number in itertools.count(arguments.seed):

        @seed(number)
        @_ROUND
        @given(body=ANY_BODY)
        def bodies(body: bytes) -> None:
            nonlocal num_inputs
            num_inputs += 1
            check_body(body)

        @seed(number)
        @_ROUND
        @given(payloads=PAYLOADS, cuts=CUTS)
        def streams(payloads: list[Any], cuts: list[int]) -> None:
            nonlocal num_inputs
            num_inputs += 1
            check_stream(payloads, cuts)

        bodies()
        streams()
        if time.monotonic() >= ends_at:
            print(f"{num_inputs} inputs, nothing found; the next seed is {number + 1}")
            sys.exit(0)


if __name__ == "__main__":
    main()
