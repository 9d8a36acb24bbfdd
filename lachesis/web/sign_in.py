"""Let nobody read the pages without the token of this home.

A program sends the token as a bearer token. A browser is signed in by a link, which `lachesis ui`
prints and which is valid for ten minutes, or by typing the token; it then keeps a cookie. Link and
cookie are signed with the token and do not reveal it.
"""

import hashlib
import hmac
import time
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from lachesis.base.http_guard import ASGIApp, Scope
from lachesis.web.rendering import get_static_prefix, render_page

LINK_LIFETIME_S, COOKIE_LIFETIME_S = 600, 30 * 86_400
SIGN_IN_PATH = "/sign-in"
START_PATH = "/runs"
MAX_FORM_BYTES = 10_000
# Files of the program, which a page that asks for the token needs too.
OPEN_PREFIX = "/static/"


def sign(token: str, purpose: str, lifetime_s: float) -> str:
    """Return a string that proves, until it expires, that its maker knew the token."""
    expires_at = str(int(time.time() + lifetime_s))
    return f"{expires_at}.{_compute_signature(token, purpose, expires_at)}"


def is_valid(signed: str, token: str, purpose: str) -> bool:
    """Return whether a string was signed with this token for this purpose and has not expired."""
    expires_at, _, signature = signed.partition(".")
    if not expires_at.isdecimal() or len(expires_at) > 12 or int(expires_at) < time.time():
        return False
    expected = _compute_signature(token, purpose, expires_at)
    return hmac.compare_digest(signature.encode(), expected.encode())


def _compute_signature(token: str, purpose: str, expires_at: str) -> str:
    message = f"lachesis pages, {purpose}, {expires_at}".encode()
    return hmac.new(token.encode(), message, hashlib.sha256).hexdigest()


def make_sign_in_link(address: str, token: str | None, path: str = START_PATH) -> str:
    """Return the address that opens a page in a browser that is not signed in yet."""
    if token is None:
        return f"{address}{path}"
    code = sign(token, "link", LINK_LIFETIME_S)
    return f"{address}{SIGN_IN_PATH}?code={code}&next={quote(path)}"


def make_cookie_name(port: int | None) -> str:
    """Return the name of the cookie. Browsers share cookies between the ports of a host."""
    return f"lachesis-{port or 80}"


class SignInGate:
    """Pass requests on that prove to know the token; answer others with a page that asks for it.

    Without a token every request is passed on.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if self.token is None or scope["type"] != "http" or self._is_open(scope):
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        if scope["path"] == SIGN_IN_PATH:
            response = await self._sign_in(request, self.token)
        else:
            response = _ask_for_token(request.url.path, request.url.query, status=401)
        await response(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        """Return whether a request may pass: it is signed in, or for a file of the program."""
        path, headers = scope["path"], dict(scope["headers"])
        if path.startswith(OPEN_PREFIX):
            return True
        if path == SIGN_IN_PATH:
            return False
        token = self.token or ""
        bearer = headers.get(b"authorization", b"")
        if hmac.compare_digest(bearer, f"Bearer {token}".encode()):
            return True
        cookie = _read_cookie(headers.get(b"cookie", b""), make_cookie_name(_get_port(scope)))
        return is_valid(cookie, token, "cookie")

    async def _sign_in(self, request: Request, token: str) -> Response:
        """Answer the link with a code, or the form in which a person typed the token."""
        if request.method == "POST":
            form = await _read_form(request)
            target = form.get("next", START_PATH)
            # A token that was copied from a terminal may end with a line feed.
            is_known = hmac.compare_digest(form.get("token", "").strip().encode(), token.encode())
        else:
            target = request.query_params.get("next", START_PATH)
            is_known = is_valid(request.query_params.get("code", ""), token, "link")
        target = target if _is_own_path(target) else START_PATH
        if not is_known:
            return _ask_for_token(target, "", status=401, was_refused=True)
        response = RedirectResponse(target, status_code=303)
        response.set_cookie(
            make_cookie_name(_get_port(request.scope)),
            sign(token, "cookie", COOKIE_LIFETIME_S),
            max_age=COOKIE_LIFETIME_S,
            httponly=True,
            # A link of the Prefect UI, on another port of this host, leads here too.
            samesite="lax",
            secure=request.url.scheme == "https",
        )
        return response


def _is_own_path(path: str) -> bool:
    """Return whether a path leads to this server and nowhere else."""
    # Browsers read two slashes, and a slash and a backslash, as the beginning of a host.
    return path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()


def _get_port(scope: Scope) -> int | None:
    server = scope.get("server")
    return server[1] if server else None


def _read_cookie(header: bytes, name: str) -> str:
    try:
        cookies: SimpleCookie = SimpleCookie(header.decode("latin-1"))
    except CookieError:
        return ""
    return cookies[name].value if name in cookies else ""


async def _read_form(request: Request) -> dict[str, str]:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            return {}
    fields = parse_qs(body.decode("utf-8", errors="replace"))
    return {name: values[0] for name, values in fields.items()}


def _ask_for_token(path: str, query: str, *, status: int, was_refused: bool = False) -> Response:
    target = f"{path}?{query}" if query else path
    page = render_page(
        "sign_in.html.j2", static=get_static_prefix(), target=target, was_refused=was_refused
    )
    headers = {"Cache-Control": "no-store", "WWW-Authenticate": "Bearer"}
    return Response(page, status_code=status, media_type="text/html", headers=headers)
