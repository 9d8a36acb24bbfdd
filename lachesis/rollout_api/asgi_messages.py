"""Read and change the messages of ASGI requests and responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from lachesis.base.http_guard import replay_body, send_json
from lachesis.base.json_text import Json

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


async def send_changed_answer(
    app: ASGIApp, scope: Scope, receive: Receive, send: Send, change: Callable[[Json], Json]
) -> None:
    """Send the application's response with `change` applied to its JSON."""
    messages: list[Message] = []

    async def collect(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, collect)
    status = next(
        message["status"] for message in messages if message["type"] == "http.response.start"
    )
    body = b"".join(message.get("body", b"") for message in messages)
    if status == 200:
        await send_json(send, status, change(json.loads(body)))
    else:
        await send_json(send, status, {"detail": body.decode(errors="replace")})


async def call_app(
    app: ASGIApp, scope: Scope, receive: Receive, body: bytes
) -> tuple[int, list[Message], str]:
    """Send a request with another body; return status, messages and text of the response."""
    messages: list[Message] = []

    async def collect(message: Message) -> None:
        messages.append(message)

    try:
        await app(_set_content_length(scope, len(body)), replay_body(body, receive), collect)
    except Exception as error:  # Validators of the API raise arbitrary exceptions.
        return 500, [], f"{type(error).__name__}: {error}"
    statuses = [
        message["status"] for message in messages if message["type"] == "http.response.start"
    ]
    status = statuses[0] if statuses else 500
    text = b"".join(message.get("body", b"") for message in messages).decode(errors="replace")
    return status, messages, text


def _set_content_length(scope: Scope, length: int) -> Scope:
    """Return the request's scope with the length of its new body."""
    # The header is that of the old body, and the API reads as many bytes as it says.
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


async def read_body(receive: Receive) -> bytes:
    """Return the whole body of a request."""
    body, has_more = bytearray(), True
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    return bytes(body)
