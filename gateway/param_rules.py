"""Parameter rules on one HTTP request: from the client's body to the one that is served."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.body import parse_object
from gateway.errors import RequestRejected
from gateway.keys.access import caller_of
from gateway.rules.engine import Outcome, RuleRequest, actions_header, apply
from gateway.rules.model import RuleSet

# Where the ASGI scope keeps what rules did, for the response header of the same meaning.
PARAM_ACTIONS = "pdmesh.param_actions"


@dataclass(frozen=True)
class RuledBody:
    """A body after rules, and the one that the client sent."""

    payload: dict[str, Any]
    sent: Mapping[str, Any]

    def answered_model(self, served: str) -> str:
        """The name that the client knows the model by."""
        name = self.sent.get("model")
        return name if isinstance(name, str) else served


def read_ruled(rules: RuleSet, scope: Scope, body: bytes) -> RuledBody:
    """Apply `rules` to an HTTP request. What they did is noted in `scope`.

    Raises RequestRejected for a rule, InvalidRequest for a body that is not a JSON object.
    """
    sent = parse_object(body)
    if not rules.rules:
        return RuledBody(sent, sent)
    caller = caller_of(scope)
    request = RuleRequest(
        body,
        sent,
        scope["path"],
        Headers(scope=scope).items(),
        key=caller.key,
        key_group=caller.group,
    )
    outcome = apply(rules, request)
    if outcome.actions:
        scope[PARAM_ACTIONS] = actions_header(outcome.actions)
    raise_if_rejected(outcome)
    return RuledBody(sent if outcome.body is body else parse_object(outcome.body), sent)


def raise_if_rejected(outcome: Outcome) -> None:
    """Raise RequestRejected where a rule refuses the request."""
    if (rejection := outcome.rejection) is not None:
        raise RequestRejected(
            rejection.message,
            status=rejection.status,
            code=rejection.code,
            param=rejection.param,
        )
