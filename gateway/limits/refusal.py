"""The answer to a caller who has used up a limit."""

from collections.abc import Mapping

from gateway.limits.headers import duration
from gateway.limits.scopes import NEVER, Scope, Verdict
from mesh.errors import RateLimited


class LimitExceeded(RateLimited):
    """One of the caller's limits is used up; `headers` say what is left of all of them."""

    def __init__(
        self, scope: Scope, verdict: Verdict, num_tokens: int, headers: Mapping[str, str]
    ) -> None:
        # As OpenAI words it: "requests" and "tokens" are types of error there.
        self.type = "tokens" if verdict.limit == "tokens" else "requests"
        self.is_final = verdict.wait_ms == NEVER
        super().__init__(
            _message(scope, verdict, num_tokens),
            retry_after_s=None if self.is_final else verdict.wait_ms / 1000,
        )
        # A client that would only be refused again need not try.
        self.headers = {**headers, "x-should-retry": "false"} if self.is_final else dict(headers)


def _message(scope: Scope, verdict: Verdict, num_tokens: int) -> str:
    limits = scope.limits
    again = f"Please try again in {duration(verdict.wait_ms)}."
    if verdict.limit == "concurrency":
        return (
            f"Rate limit reached for {scope.name}: {limits.max_concurrency} requests at a time. "
            "Please try again when one of them is over."
        )
    if verdict.limit == "requests":
        return (
            f"Rate limit reached for {scope.name} on requests per min (RPM): "
            f"Limit {limits.requests_per_minute}. {again}"
        )
    limit = f"on tokens per min (TPM): Limit {limits.tokens_per_minute}, Requested {num_tokens}."
    if verdict.wait_ms == NEVER:
        return (
            f"Request too large for {scope.name} {limit} "
            "A smaller prompt or a smaller max_tokens is needed."
        )
    return f"Rate limit reached for {scope.name} {limit} {again}"
