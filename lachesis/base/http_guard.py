"""Check every request to our HTTP servers before the application sees it.

The guard is an ASGI application around another one. It requires a Host and an Origin of this
server, a bearer token where clients can send one, and a body of limited size.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import zlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lachesis.base import paths
from lachesis.base.files import read_or_create_secret, storage_errors
from lachesis.base.json_text import to_compact_json

if TYPE_CHECKING:
    from starlette.types import Receive, Send


Scope = MutableMapping[str, Any]
ASGIApp = Callable[[Scope, Any, Any], Awaitable[None]]
MAX_BODY_BYTES = 1_000_000
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
# Headers that may occur once only: a server behind this one might read another of several values.
SINGLE_HEADERS = (
    b"host",
    b"origin",
    b"authorization",
    b"content-encoding",
    b"content-length",
    b"sec-fetch-site",
)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is that of the loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HttpGuard:
    """Refuse requests that other web pages make, that lack the token, or that are too large.

    A page of another site, or of a name that was pointed at this address (DNS rebinding), gets
    status 403; a missing or wrong token 401; a body over `max_body_bytes` 413, also when it comes
    in chunks or only exceeds the limit once decompressed. With `serves_pages` a browser may follow
    links to this server and open websockets.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        token: str | None,
        allowed_hosts: Iterable[str] = (),
        open_paths: tuple[str, ...] = (),
        max_body_bytes: int = MAX_BODY_BYTES,
        serves_pages: bool = False,
        token_hint: str = "$LACHESIS_TOKEN, or the file `token` in $LACHESIS_HOME",
    ) -> None:
        self.app, self.open_paths, self.max_body_bytes, self.token_hint = (
            app,
            open_paths,
            max_body_bytes,
            token_hint,
        )
        self.serves_pages = serves_pages
        self.hosts = {
            name.lower()
            for name in (host, *(LOOPBACK_HOSTS if is_loopback(host) else ()), *allowed_hosts)
        }
        self.token = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            if self.serves_pages and not self._find_refusal(scope["headers"], scope["path"]):
                await self.app(scope, receive, send)
            else:
                # 1008 means that a policy was violated.
                await send({"type": "websocket.close", "code": 1008})
        elif refusal := self._find_refusal(scope["headers"], scope["path"]):
            await _send_error(send, *refusal)
        else:
            await self._forward(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; a body that is packed or of unknown length is read whole before."""
        headers = dict(scope["headers"])
        is_gzip = b"content-encoding" in headers  # in gzip, or it was refused
        # The length of such a body was checked in its header.
        if not is_gzip and b"transfer-encoding" not in headers:
            await self.app(scope, receive, send)
            return
        body = await self._read_body(receive, is_gzip=is_gzip)
        if body is None:
            await _send_error(
                send,
                413,
                "too_large",
                f"a body of more than {self.max_body_bytes} bytes, or not one whole gzip stream",
            )
            return
        dropped = (
            b"transfer-encoding",
            b"content-length",
            *([b"content-encoding"] if is_gzip else []),
        )
        kept_headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
        new_scope = {
            **scope,
            "headers": [*kept_headers, (b"content-length", str(len(body)).encode())],
        }
        await self.app(new_scope, replay_body(body, receive), send)

    async def _read_body(self, receive: Receive, *, is_gzip: bool) -> bytes | None:
        """Return the whole decompressed body, or None when it is too large or not valid gzip."""
        # 31 makes zlib expect the header of gzip.
        body, decompressor = bytearray(), zlib.decompressobj(31) if is_gzip else None
        has_more, num_received = True, 0
        while has_more:
            message = await receive()
            has_more = message.get("more_body", False)
            chunk = message.get("body", b"")
            num_received += len(chunk)
            try:
                if decompressor:
                    # One byte more than is allowed proves that the limit is exceeded, without the
                    # rest of a body that might decompress to terabytes.
                    body += decompressor.decompress(chunk, self.max_body_bytes + 1 - len(body))
                else:
                    body += chunk
            except zlib.error:
                return None
            if max(len(body), num_received) > self.max_body_bytes or (
                decompressor and decompressor.unused_data
            ):
                return None
        if decompressor is None or decompressor.eof:
            return bytes(body)
        return None

    def _find_refusal(
        self, raw_headers: list[tuple[bytes, bytes]], path: str
    ) -> tuple[int, str, str] | None:
        """Return status, code and sentence with which a request is refused, or None."""
        headers = dict(raw_headers)
        duplicates = [
            header
            for header in SINGLE_HEADERS
            if sum(name == header for name, _ in raw_headers) > 1
        ]
        if duplicates:
            return 400, "duplicate_header", f"{duplicates[0].decode()} was sent more than once"
        if refusal := self._find_foreign_page(headers):
            return 403, *refusal
        if self._needs_token(path) and not hmac.compare_digest(
            headers.get(b"authorization", b""), self.token or b""
        ):
            return 401, "unauthorized", f"a bearer token is needed: {self.token_hint}"
        if headers.get(b"content-encoding", b"gzip") != b"gzip":
            message = "the content encoding of a body is unknown; allowed: gzip, or no encoding"
            return 415, "unknown_encoding", message
        size = headers.get(b"content-length", b"0")
        if not size.isdigit() or int(size) > self.max_body_bytes:
            size_text = size.decode("latin-1")[:20]
            message = f"a body of {size_text} bytes; allowed: {self.max_body_bytes}"
            return 413, "too_large", message
        return None

    def _find_foreign_page(self, headers: dict[bytes, bytes]) -> tuple[str, str] | None:
        """Return the code and the message if a page of another site has sent the request.

        Such a page could otherwise use a server on loopback through the browser of its reader, also
        with a name of its own that resolves to 127.0.0.1 (DNS rebinding).
        """
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if _parse_hostname(f"//{host}") not in self.hosts:
            allowed = ", ".join(sorted(self.hosts))
            return "host_not_allowed", f"Host {host[:100]!r} is not served here; allowed: {allowed}"
        if origin and _parse_netloc(origin) != host:  # Only pages of this server may call it.
            message = (
                f"web pages from {origin[:100]!r} may not call this server; only its own pages may"
            )
            return "origin_not_allowed", message
        if self._is_cross_site(headers):
            message = "web pages from other sites may not call this server; only its own pages may"
            return "cross_site_request", message
        return None

    def _needs_token(self, path: str) -> bool:
        """Return whether a request for this path needs the token.

        An open path other than `/` also opens all paths that begin with it.
        """
        if self.token is None:
            return False
        return not any(
            path == open_path or (len(open_path) > 1 and path.startswith(open_path))
            for open_path in self.open_paths
        )

    def _is_cross_site(self, headers: dict[bytes, bytes]) -> bool:
        """Return whether a browser says that a page of another site makes this request.

        Browsers send no Origin header for images and links, but they do send `Sec-Fetch-Site`.
        """
        is_navigation = self.serves_pages and headers.get(b"sec-fetch-mode") == b"navigate"
        return (
            headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
            and not is_navigation
        )


def _parse_hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _parse_netloc(url: str) -> str | None:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return None


def replay_body(body: bytes, receive: Receive) -> Any:
    """Return an ASGI `receive` that first yields this body, which was read already."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Any:
        return next(messages, None) or await receive()

    return replay


async def send_json(
    send: Send, status: int, content: object, *headers: tuple[bytes, bytes]
) -> None:
    """Send a JSON response."""
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", b"application/json"), *headers],
    }
    await send(start)
    await send(
        {"type": "http.response.body", "body": to_compact_json(content).encode(errors="replace")}
    )


async def _send_error(send: Send, status: int, code: str, error: str) -> None:
    headers = [(b"www-authenticate", b"Bearer")] if status == 401 else []
    content = {"error": error, "code": code}
    await send_json(send, status, content, *headers)


def load_or_create_token() -> str:
    """Return `$LACHESIS_TOKEN`, or else the token of this home, which is created on first use.

    Raises:
        StorageError: The token file cannot be read or written.
    """
    configured_token = os.environ.get("LACHESIS_TOKEN")
    if configured_token:
        return configured_token
    file = paths.home() / "token"
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    return read_or_create_secret(file)


def describe_token_location() -> str:
    """Return where a person finds the token."""
    if os.environ.get("LACHESIS_TOKEN"):
        return "$LACHESIS_TOKEN"
    return str(paths.home() / "token")
