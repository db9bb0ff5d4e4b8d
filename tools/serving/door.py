"""Who may speak to the server: the names that it is called by, the pages that may ask it, and the key."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tools.serving import LOCAL
from tools.serving.answers import error_object
from tools.serving.asked import RefusedError

OPEN = ("/", "/health")
"""Places that need no key: the page, which asks for it, and what a balancer looks at."""


class Door:
    """Refuses a request before anything reads it.

    Args:
        hosts: names that the server may be called by. An address in digits is one always: a page from elsewhere can
            have its own name point here (DNS rebinding), but no address.
        key: that requests must bring as `Authorization: Bearer ...`; None: they need none.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str], key: str | None) -> None:
        self.app, self.hosts, self.key = app, hosts, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and (refusal := self.refusal(scope["path"], Headers(scope=scope))) is not None:
            headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
            await JSONResponse(error_object(refusal), refusal.status, headers)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def refusal(self, path: str, headers: Headers) -> RefusedError | None:
        """Why a request is not answered; None where it is."""
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        if not _is_address(name := _name(f"//{host}")) and name not in self.hosts:
            return RefusedError(f"This server is not called {host!r}. Start it with --allow-host to add a name.",
                                status=400, code="unknown_host")
        # The page's own origin is the host that it asks; behind a proxy, one of the names that were given.
        if origin and origin.partition("//")[2] != host and _name(origin) not in self.hosts.difference(LOCAL):
            return RefusedError(f"Pages of {origin!r} may not ask this server.", status=403, code="other_origin")
        if self.key is None or path in OPEN:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.key.encode()):
            return None
        return RefusedError("This server needs its key: send the header `Authorization: Bearer KEY`.", status=401,
                            code="invalid_api_key")


def _name(url: str) -> str:
    """Of the host; "" where there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
