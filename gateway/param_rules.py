"""Parameter rules on one HTTP request: from the client's body to the one that is served."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.body import parse_object
from gateway.errors import RequestRejected
from gateway.rules.engine import RuleRequest, actions_header, apply
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
    """Apply `rules`. What they did is noted in `scope` and on the current span.

    Raises RequestRejected for a rule, InvalidRequest for a body that is not a JSON object.
    """
    sent = parse_object(body)
    if not rules.rules:
        return RuledBody(sent, sent)
    headers = Headers(scope=scope).items()
    outcome = apply(rules, RuleRequest(body, sent, scope["path"], headers))
    if outcome.actions:
        scope[PARAM_ACTIONS] = actions_header(outcome.actions)
        trace.get_current_span().set_attribute(PARAM_ACTIONS, scope[PARAM_ACTIONS])
    if (rejection := outcome.rejection) is not None:
        raise RequestRejected(
            rejection.message,
            status=rejection.status,
            code=rejection.code,
            param=rejection.param,
        )
    return RuledBody(sent if outcome.body is body else parse_object(outcome.body), sent)
