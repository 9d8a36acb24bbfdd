"""What every HTTP surface for agents asks of a request: a Host and Origin that are ours, and the bearer token."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from lachesis import paths
from lachesis.errors import StorageError, as_text
from lachesis.runs import storage_errors, write_private

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
MOST_BYTES = 1_000_000
LOCAL = ("127.0.0.1", "localhost", "::1")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_token() -> str:
    """`$LACHESIS_TOKEN`, else that of this home, which is made at the first call. Raises StorageError."""
    named = os.environ.get("LACHESIS_TOKEN")
    if named:
        return named
    file = paths.home() / "token"
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_name(f".token.{secrets.token_hex(4)}")
        write_private(made, secrets.token_urlsafe(32))
        with contextlib.suppress(FileExistsError):
            os.link(made, file)  # the first of several wins
        made.unlink()
        token = file.read_text().strip()
    if not token:
        raise StorageError(f"{file} is empty; delete it, and a new token is made")
    return token


class Guard:
    """Pure ASGI. A page in a browser that was led here by a foreign name (DNS rebinding) is refused with 403, a missing or
    wrong token with 401, a body beyond a megabyte with 413, and one of unknown size with 411."""

    def __init__(
        self, app: App, *, host: str, token: str | None, allowed_hosts: Iterable[str] = (), without_token: tuple[str, ...] = ()
    ) -> None:
        self.app, self.without_token = app, without_token
        self.hosts = {one.lower() for one in (host, *(LOCAL if is_loopback(host) else ()), *allowed_hosts)}
        self.token = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif refusal := self._refusal(scope["headers"], scope["path"]):
            await _answer(send, *refusal)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, received: list[tuple[bytes, bytes]], path: str) -> tuple[int, str, str] | None:
        headers = dict(received)
        twice = [one for one in (b"host", b"origin", b"authorization") if sum(name == one for name, _ in received) > 1]
        if twice:
            return 400, "duplicate_header", f"{twice[0].decode()} was sent more than once"
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin", b"").decode("latin-1")
        if _name(f"//{host}") not in self.hosts:
            return 403, "foreign_host", f"Host {host[:100]!r} is not served here; allowed: {', '.join(sorted(self.hosts))}"
        if origin and _netloc(origin) != host:  # a page of this very server, or none
            return 403, "foreign_origin", f"Origin {origin[:100]!r} may not call this server"
        needs_token = self.token is not None and not path.startswith(self.without_token)
        if needs_token and not hmac.compare_digest(headers.get(b"authorization", b""), self.token or b""):
            return 401, "unauthorized", "a bearer token is needed: $LACHESIS_TOKEN, or the file `token` in $LACHESIS_HOME"
        if b"transfer-encoding" in headers:
            return 411, "length_required", "a body needs a Content-Length"
        size = headers.get(b"content-length", b"0")
        if not size.isdigit() or int(size) > MOST_BYTES:
            return 413, "too_large", f"a body of {size.decode('latin-1')[:20]} bytes; allowed: {MOST_BYTES}"
        return None


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _netloc(url: str) -> str | None:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return None


async def _answer(send: Any, status: int, code: str, error: str) -> None:
    headers = [(b"content-type", b"application/json")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": as_text({"error": error, "code": code}).encode()})
