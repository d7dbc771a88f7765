"""Who may look at the dashboard: whoever has its key or an admin's, or else this machine."""

import hmac
import ipaddress

from starlette.requests import Request

from gateway.keys.ring import KeyRing
from mesh.errors import Unauthenticated

COOKIE = "pdmesh_dashboard"

# A proxy on this machine calls from this machine, for whomever.
_FORWARDING = ("forwarded", "x-forwarded-for", "x-real-ip")


def check_access(request: Request, key: str | None, keys: KeyRing) -> None:
    """Raise Unauthenticated unless the caller may look."""
    if key is not None or keys.is_required:
        if not _opens(given_key(request), key, keys):
            raise Unauthenticated(
                "the dashboard needs its key, or an admin API key: open /dashboard?key=…"
            )
    elif not _is_local(request):
        raise Unauthenticated(
            "without dashboard_key the dashboard answers on this machine only, by its own names"
        )


def given_key(request: Request) -> str:
    """The key that came with a request, from wherever a browser or a command puts it."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return request.query_params.get("key") or request.cookies.get(COOKIE, "")


def _opens(given: str, key: str | None, keys: KeyRing) -> bool:
    if key is not None and hmac.compare_digest(given.encode(), key.encode()):
        return True
    caller = keys.find(given) if keys.is_required else None
    return caller is not None and caller.is_admin


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
