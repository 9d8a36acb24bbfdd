"""Call the Tinker SDK so that its versions from 0.27 on work alike.

Since 0.38 an operation returns a future that can be awaited, and its twin `NAME_async` warns that
it will go. Before, `NAME` may block until the server has answered, and the twin is the one to
await. Nothing here loads the SDK, which takes seconds.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lachesis.base.errors import MissingDependencyError, ServerProtocolError
from lachesis.base.keys import read_key
from lachesis.base.tinker_http import get_base_url, request_tinker

if TYPE_CHECKING:
    import tinker


async def call_sdk(client: object, name: str, *values: object, **options: object) -> Any:
    """Return the result of an operation of an SDK's client, such as `sample`.

    Raises:
        ServerProtocolError: The SDK refuses the server's answer.
        tinker.TinkerError: The operation has failed.
    """
    operation = getattr(client, f"{name}_async", None)
    if operation is None or hasattr(operation, "__deprecated__"):
        operation = getattr(client, name)
    with name_refused_answers():
        result = operation(*values, **options)
        if inspect.isawaitable(result):
            return await result
        if isinstance(result, concurrent.futures.Future):
            return await asyncio.wrap_future(result)
        return result


@contextlib.contextmanager
def name_refused_answers() -> Iterator[None]:
    """Raise ServerProtocolError where the SDK's own check of an answer fails during the block."""
    try:
        yield
    except AssertionError as error:
        raise ServerProtocolError(
            f"the Tinker SDK refuses an answer of the server at {get_base_url()}: "
            f"{error or 'it says no more'}. The server may be made for an older SDK; use a newer "
            "version of it, or let `tinker.backend` put our bridge before it"
        ) from error


def wait_for_sdk(result: object) -> Any:
    """Return what an operation of the SDK returned, or the result of its future. This blocks."""
    get_result = getattr(result, "result", None)
    if get_result is None:
        return result
    return get_result()


async def end_session(service_client: tinker.ServiceClient, status: str) -> None:
    """End the session, which frees its memory on the server.

    Args:
        service_client: The client that has opened it.
        status: How its work ended: success, errored or interrupted.
    """
    if hasattr(service_client, "close"):
        await call_sdk(service_client, "close", status)
        return
    session_id = service_client.holder.get_session_id()
    path, body = f"sessions/{session_id}/finish", {"reason": {"type": status}}
    await asyncio.to_thread(request_tinker, "POST", path, read_key("TINKER_API_KEY"), json=body)


def make_rest_client(service_client: tinker.ServiceClient) -> tinker.RestClient:
    """Return a client of the server's checkpoints; this sends a request and blocks."""
    import tinker

    if hasattr(tinker, "RestClient"):
        return _make_rest_client()
    rest_client: tinker.RestClient = service_client.create_rest_client()
    return rest_client


def _make_rest_client() -> tinker.RestClient:
    import tinker
    from tinker.lib.base_url import resolve_base_url

    # Without an address it would be a client of the server that this process has asked first.
    return tinker.RestClient(base_url=resolve_base_url())


@contextlib.contextmanager
def open_service_client(
    user_metadata: dict[str, str] | None = None,
) -> Iterator[tinker.ServiceClient]:
    """Open a session with the server during the block."""
    import tinker

    service_client = tinker.ServiceClient(user_metadata=user_metadata)
    try:
        yield service_client
    finally:
        # Sessions of the oldest versions end by themselves, without a heartbeat.
        if hasattr(service_client, "close"):
            with contextlib.suppress(tinker.TinkerError):
                wait_for_sdk(service_client.close("success"))


@contextlib.contextmanager
def open_rest_client() -> Iterator[tinker.RestClient]:
    """Open a client of the server's checkpoints, where there is no session with the server yet."""
    import tinker

    if hasattr(tinker, "RestClient"):
        yield _make_rest_client()
        return
    with open_service_client() as service_client:
        yield make_rest_client(service_client)


def require_operation(client: object, name: str, purpose: str) -> None:
    """Raise MissingDependencyError if this version of the SDK does not have an operation."""
    if hasattr(client, name):
        return
    import tinker

    raise MissingDependencyError(
        f"version {tinker.__version__} of the Tinker SDK cannot {purpose}; install a newer one "
        "with `pip install --upgrade tinker`"
    )
