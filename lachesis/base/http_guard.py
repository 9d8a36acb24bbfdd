"""What every HTTP server of this project asks of a request: a Host and Origin that are ours, a bearer token where its clients
can send one, and a body of bounded size. Pure ASGI, around the application."""

from __future__ import annotations

import hmac
import ipaddress
import zlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from lachesis.base.errors import as_text

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
MOST_BYTES = 1_000_000
LOCAL = ("127.0.0.1", "localhost", "::1")
ONCE = (b"host", b"origin", b"authorization", b"content-encoding", b"content-length", b"sec-fetch-site")
"""Headers of which servers behind this one might read another than this one reads."""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """A page in a browser that came from elsewhere, or was led here by a foreign name (DNS rebinding), is refused with 403, a
    missing or wrong token with 401, a body beyond `most_bytes` with 413, also one that is sent in pieces or grows when it is
    unpacked. `pages` says that a browser shows what is served here: it may follow a link to it, and open websockets."""

    def __init__(
        self,
        app: App,
        *,
        host: str,
        token: str | None,
        allowed_hosts: Iterable[str] = (),
        without_token: tuple[str, ...] = (),
        most_bytes: int = MOST_BYTES,
        pages: bool = False,
        where: str = "$LACHESIS_TOKEN, or the file `token` in $LACHESIS_HOME",
    ) -> None:
        self.app, self.without_token, self.most_bytes, self.where = app, without_token, most_bytes, where
        self.pages = pages
        self.hosts = {one.lower() for one in (host, *(LOCAL if is_loopback(host) else ()), *allowed_hosts)}
        self.token = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            if self.pages and not self._refusal(scope["headers"], scope["path"]):
                await self.app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
        elif refusal := self._refusal(scope["headers"], scope["path"]):
            await _refuse(send, *refusal)
        else:
            await self._pass(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        packed = b"content-encoding" in headers  # in gzip, or it was refused
        if not packed and b"transfer-encoding" not in headers:
            await self.app(scope, receive, send)
            return
        body = await self._body(receive, packed=packed)
        if body is None:
            await _refuse(send, 413, "too_large", f"a body of more than {self.most_bytes} bytes, or not one whole gzip stream")
            return
        dropped = (b"transfer-encoding", b"content-length", *([b"content-encoding"] if packed else []))
        kept = [(name, value) for name, value in scope["headers"] if name not in dropped]
        fresh = {**scope, "headers": [*kept, (b"content-length", str(len(body)).encode())]}
        await self.app(fresh, replaying(body, receive), send)

    async def _body(self, receive: Any, *, packed: bool) -> bytes | None:
        """All of it, unpacked; None when it is too large or no gzip."""
        body, unpack = bytearray(), zlib.decompressobj(31) if packed else None
        more, taken = True, 0
        while more:
            message = await receive()
            more = message.get("more_body", False)
            chunk = message.get("body", b"")
            taken += len(chunk)
            try:
                body += unpack.decompress(chunk, self.most_bytes + 1 - len(body)) if unpack else chunk
            except zlib.error:
                return None
            if max(len(body), taken) > self.most_bytes or (unpack and unpack.unused_data):
                return None
        return bytes(body) if unpack is None or unpack.eof else None

    def _refusal(self, received: list[tuple[bytes, bytes]], path: str) -> tuple[int, str, str] | None:
        headers = dict(received)
        twice = [one for one in ONCE if sum(name == one for name, _ in received) > 1]
        if twice:
            return 400, "duplicate_header", f"{twice[0].decode()} was sent more than once"
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin", b"").decode("latin-1")
        if _name(f"//{host}") not in self.hosts:
            return 403, "foreign_host", f"Host {host[:100]!r} is not served here; allowed: {', '.join(sorted(self.hosts))}"
        if origin and _netloc(origin) != host:  # a page of this very server, or none
            return 403, "foreign_origin", f"Origin {origin[:100]!r} may not call this server"
        if self._from_elsewhere(headers):
            return 403, "foreign_page", "a page that came from elsewhere may not call this server"
        if self._needs_token(path) and not hmac.compare_digest(headers.get(b"authorization", b""), self.token or b""):
            return 401, "unauthorized", f"a bearer token is needed: {self.where}"
        if headers.get(b"content-encoding", b"gzip") != b"gzip":
            return 415, "unknown_encoding", "the content encoding of a body may be gzip, or there is none"
        size = headers.get(b"content-length", b"0")
        if not size.isdigit() or int(size) > self.most_bytes:
            return 413, "too_large", f"a body of {size.decode('latin-1')[:20]} bytes; allowed: {self.most_bytes}"
        return None

    def _needs_token(self, path: str) -> bool:
        """Return whether a request of this path needs the token. An open path that is longer than / opens what is below it."""
        if self.token is None:
            return False
        return not any(path == one or (len(one) > 1 and path.startswith(one)) for one in self.without_token)

    def _from_elsewhere(self, headers: dict[bytes, bytes]) -> bool:
        """A browser sends no Origin for a picture or a link, but says this of what asks for it."""
        page = self.pages and headers.get(b"sec-fetch-mode") == b"navigate"
        return headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin") and not page


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


def replaying(body: bytes, receive: Any) -> Any:
    """A `receive` that gives this body, which was read already."""
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Any:
        return next(parts, None) or await receive()

    return replay


async def answer(send: Any, status: int, content: Any, *headers: tuple[bytes, bytes]) -> None:
    """Send this JSON."""
    start = {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json"), *headers]}
    await send(start)
    await send({"type": "http.response.body", "body": as_text(content).encode(errors="replace")})


async def _refuse(send: Any, status: int, code: str, error: str) -> None:
    headers = [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await answer(send, status, {"error": error, "code": code}, *headers)
