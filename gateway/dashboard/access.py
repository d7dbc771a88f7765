"""Who may look at the dashboard: this machine, or whoever has its key."""

import hmac
import ipaddress

from starlette.requests import Request

from mesh.errors import Unauthenticated

COOKIE = "pdmesh_dashboard"

# A proxy on this machine calls from this machine, for whomever.
_FORWARDING = ("forwarded", "x-forwarded-for", "x-real-ip")


def check_access(request: Request, key: str | None) -> None:
    """Raise Unauthenticated unless the caller may look."""
    if key is not None:
        if not hmac.compare_digest(_given_key(request).encode(), key.encode()):
            raise Unauthenticated("the dashboard needs its key: open /dashboard?key=…")
    elif not _is_local(request):
        raise Unauthenticated(
            "without dashboard_key the dashboard answers on this machine only, by its own names"
        )


def _given_key(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return request.query_params.get("key") or request.cookies.get(COOKIE, "")


def _is_local(request: Request) -> bool:
    """A connection from this machine that also names it.

    The second keeps other sites' scripts out, whose names may resolve to this address.
    """
    if request.client is None or any(name in request.headers for name in _FORWARDING):
        return False
    host = request.url.hostname or ""
    return _is_loopback(request.client.host) and (host == "localhost" or _is_loopback(host))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
