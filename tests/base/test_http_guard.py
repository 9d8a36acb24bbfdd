"""What every HTTP server refuses before its application sees it."""

import asyncio
import gzip
from typing import Any

import pytest

from lachesis.base.http_guard import HttpGuard

OWN = [(b"host", b"127.0.0.1:80"), (b"authorization", b"Bearer t")]
Header = tuple[bytes, bytes]


def ask(headers, *chunks, path="/x", **options):
    """The status, and the bodies that the application was given."""
    seen: list[bytes] = []
    sent: list[dict[str, Any]] = []

    async def app(scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        seen.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    parts = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    queue = iter([*parts, {"type": "http.request", "body": b"", "more_body": False}])

    async def receive():
        return next(queue)

    async def send(message):
        sent.append(message)

    guard = HttpGuard(app, host="127.0.0.1", token="t", max_body_bytes=1000, **options)
    asyncio.run(guard({"type": "http", "path": path, "headers": headers}, receive, send))
    return sent[0]["status"], seen


@pytest.mark.parametrize(
    ("path", "status"), [("/", 200), ("/docs", 200), ("/docs/x", 200), ("/runs", 401), ("", 401)]
)
def test_an_open_entrance_does_not_open_what_is_behind_it(path, status):
    assert ask([(b"host", b"127.0.0.1:80")], path=path, open_paths=("/", "/docs"))[0] == status


PACKED: list[Header] = [*OWN, (b"content-encoding", b"gzip"), (b"transfer-encoding", b"chunked")]


def test_a_packed_body_arrives_unpacked():
    whole = gzip.compress(b"hello")
    assert ask(PACKED, whole[:7], whole[7:]) == (200, [b"hello"])


@pytest.mark.parametrize(
    ("chunks", "status"),
    [
        ([gzip.compress(bytes(2000))], 413),
        ([gzip.compress(b"{}"), b"x" * 10], 413),
        ([gzip.compress(b"{}"), gzip.compress(b"{}")], 413),
        ([gzip.compress(b"hello")[:-3]], 413),
        ([b"no gzip"], 413),
        ([b""], 413),
    ],
)
def test_a_body_that_is_not_one_small_gzip_stream_is_refused(chunks, status):
    assert ask(PACKED, *chunks) == (status, [])


def test_a_body_in_pieces_is_bounded():
    chunked = [*OWN, (b"transfer-encoding", b"chunked")]
    assert ask(chunked, b"x" * 600, b"y" * 300) == (200, [b"x" * 600 + b"y" * 300])
    assert ask(chunked, b"x" * 600, b"y" * 500) == (413, [])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"content-encoding", b"x-gzip")], 415),
        ([(b"content-encoding", b"gzip, gzip")], 415),
        ([(b"content-encoding", b"gzip"), (b"content-encoding", b"identity")], 400),
        ([(b"host", b"127.0.0.1")], 400),
        ([(b"authorization", b"Bearer t")], 400),
        ([(b"content-length", b"5"), (b"content-length", b"7")], 400),
        ([(b"content-length", b"-1")], 413),
        ([(b"content-length", b"1001")], 413),
        ([(b"origin", b"http://127.0.0.1:81")], 403),
        ([(b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"no-cors")], 403),
        ([(b"sec-fetch-site", b"same-site")], 403),
        ([(b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")], 403),
        ([(b"sec-fetch-site", b"none")], 200),
        ([(b"origin", b"http://127.0.0.1:80"), (b"sec-fetch-site", b"same-origin")], 200),
    ],
)
def test_strange_headers_are_refused(headers, status):
    assert ask([*OWN, *headers])[0] == status


def test_a_link_leads_to_what_a_browser_shows():
    link = [(b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")]
    assert ask([*OWN, *link], serves_pages=True)[0] == 200
    assert ask([*OWN, link[0], (b"sec-fetch-mode", b"no-cors")], serves_pages=True)[0] == 403
