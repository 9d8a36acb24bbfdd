"""Forward requests to a model's endpoint and add its key, so that environments never see the key.

    python -m lachesis.supervision.endpoint_proxy --port PORT

It forwards `POST /v1/chat/completions`, `POST /v1/completions` and `GET /v1/models` to
$LACHESIS_ENDPOINT_URL and nowhere else. Clients send the token in $LACHESIS_PROXY_TOKEN, which is
made for one test; the endpoint gets the key in $LACHESIS_ENDPOINT_KEY. No response contains the
key, whatever the endpoint returns.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lachesis.base.http_guard import HttpGuard
from lachesis.base.uvicorn_internals import ReceiveDeadlineProtocol

MAX_REQUEST_BYTES = 32_000_000
MAX_RESPONSE_BYTES = 500_000_000
TIMEOUT = httpx.Timeout(600.0, connect=30.0)
# Headers of the endpoint's response that its clients use.
FORWARDED_HEADERS = (
    "content-type",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-request-id",
)


class UpstreamResponseError(Exception):
    """The endpoint's response ended early or is too large; the client sees a broken connection."""


def create_app(endpoint: str, key: str, token: str) -> HttpGuard:
    """Return the proxy as an ASGI application.

    Args:
        endpoint: URL of the endpoint, up to its `/v1` or equivalent.
        key: Sent to the endpoint as a bearer token; if empty none is sent.
        token: Required for every request except `GET /health`.
    """
    client = httpx.AsyncClient(
        timeout=TIMEOUT, limits=httpx.Limits(max_connections=None, max_keepalive_connections=64)
    )

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def forward(request: Request) -> Response:
        return await _forward_request(client, request, endpoint, key)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    routes = [
        Route("/health", health),
        Route("/v1/chat/completions", forward, methods=["POST"]),
        Route("/v1/completions", forward, methods=["POST"]),
        Route("/v1/models", forward, methods=["GET"]),
    ]
    return HttpGuard(
        Starlette(routes=routes, lifespan=lifespan),
        host="127.0.0.1",
        token=token,
        open_paths=("/health",),
        max_body_bytes=MAX_REQUEST_BYTES,
        token_hint="the proxy of a test is for its own environment",
    )


async def _forward_request(
    client: httpx.AsyncClient, request: Request, endpoint: str, key: str
) -> Response:
    """Send a request to the endpoint with its key, and stream the response back without it."""
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    path = request.url.path.removeprefix("/v1")
    query = f"?{request.url.query}" if request.url.query else ""
    body = await request.body()
    try:
        upstream_request = client.build_request(
            request.method, f"{endpoint}{path}{query}", headers=headers, content=body
        )
        response = await client.send(upstream_request, stream=True, follow_redirects=False)
    except httpx.HTTPError as error:
        return _make_unreachable_response(endpoint, f"{type(error).__name__}: {error}")
    if response.is_redirect:  # The client would send its token to the new address.
        await response.aclose()
        return _make_unreachable_response(
            endpoint, f"it redirects with HTTP {response.status_code}, which is not followed"
        )
    return StreamingResponse(
        _redact_body(response, key.encode()),
        response.status_code,
        _select_headers(response, key),
    )


def _select_headers(response: httpx.Response, key: str) -> dict[str, str]:
    """Return the headers that clients use, without the key."""
    headers = {}
    for name in FORWARDED_HEADERS:
        value = response.headers.get(name)
        if value is not None:
            # An endpoint may repeat the request's header in its own.
            headers[name] = value.replace(key, "***") if key else value
    return headers


def _make_unreachable_response(endpoint: str, reason: str) -> JSONResponse:
    public_url = httpx.URL(endpoint).copy_with(username=None, password=None)
    message = (
        f"the endpoint {public_url} could not be used: {reason}; $OPENAI_BASE_URL sets another "
        "address"
    )
    return JSONResponse({"error": {"message": message, "type": "endpoint_unreachable"}}, 502)


async def _redact_body(response: httpx.Response, key: bytes) -> AsyncIterator[bytes]:
    """Yield the response's body without the key, even if the key spans two chunks."""
    rest, total = b"", 0
    try:
        async for chunk in response.aiter_bytes():
            total += len(chunk)
            if total > MAX_RESPONSE_BYTES:
                raise UpstreamResponseError(
                    f"the endpoint's response has more than {MAX_RESPONSE_BYTES} bytes"
                )
            redacted = (rest + chunk).replace(key, b"***") if key else chunk
            num_held = _count_partial_key_bytes(redacted, key)
            rest = redacted[len(redacted) - num_held :]
            yield redacted[: len(redacted) - num_held]
        yield rest
    except httpx.HTTPError as error:
        raise UpstreamResponseError(
            f"the endpoint's response ended early: {type(error).__name__}"
        ) from None
    finally:
        await response.aclose()


def _count_partial_key_bytes(text: bytes, key: bytes) -> int:
    """Return how many of the last bytes may be the beginning of the key."""
    return next(
        (
            size
            for size in range(min(len(key) - 1, len(text)), 0, -1)
            if key.startswith(text[-size:])
        ),
        0,
    )


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m lachesis.supervision.endpoint_proxy")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    # The URL may contain a password, so it is not an argument.
    endpoint, token = (
        os.environ["LACHESIS_ENDPOINT_URL"].rstrip("/"),
        os.environ["LACHESIS_PROXY_TOKEN"],
    )
    try:
        httpx.URL(endpoint)
    except httpx.InvalidURL as error:
        sys.exit(f"$OPENAI_BASE_URL is not an address: {error}")
    app = create_app(endpoint, os.environ.get("LACHESIS_ENDPOINT_KEY", ""), token)
    uvicorn.run(
        app,
        http=ReceiveDeadlineProtocol,
        host="127.0.0.1",
        port=args.port,
        log_level="warning",
        timeout_graceful_shutdown=1,
    )


if __name__ == "__main__":
    main()
