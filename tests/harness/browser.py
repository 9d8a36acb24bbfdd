"""A page of headless Chromium that notes what must not happen: errors, and requests elsewhere."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from tests.e2e.prefect_pages import CHROMIUM, NO_CHROMIUM
from tests.harness.processes import serve

__all__ = ["CHROMIUM", "NO_CHROMIUM", "Watched", "open_page", "serve"]
PATIENCE_MS = 20_000
# Chromium gives up a request when a network interface of the machine changes, and asks again.
NETWORK_CHANGED = "net::ERR_NETWORK_CHANGED"
# htmx logs as errors that it took back a request which a newer one replaces. The first message
# precedes each kind of failure, and each kind that is one has a second message of its own.
REPLACED = ("htmx:afterRequest", "htmx:sendAbort")


@dataclass
class Watched:
    """A page with everything that it has complained of."""

    page: Page
    address: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def visit(self, path: str) -> None:
        """Load a page and wait until nothing is loading."""
        self.page.goto(self.address + path)

    def assert_calm(self) -> None:
        """Fail if there was an error, or a request to another server."""
        assert not self.complaints, "\n".join(self.complaints)
        allowed = (self.address, "data:", "blob:")
        assert [url for url in self.requests if not url.startswith(allowed)] == []


@contextlib.contextmanager
def open_page(
    chromium: Browser, address: str, *, width: int = 1280, height: int = 900, is_dark: bool = False
) -> Iterator[Watched]:
    """A page that is closed with the block."""
    page = chromium.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if is_dark else "light",
        reduced_motion="reduce",
    )
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    watched = Watched(page, address)
    page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    page.on("console", lambda message: _note(watched, message))
    page.on("request", lambda request: watched.requests.append(request.url))
    yield watched
    page.close()


def _note(watched: Watched, message: ConsoleMessage) -> None:
    harmless = NETWORK_CHANGED in message.text or message.text.startswith(REPLACED)
    if message.type in ("error", "warning") and not harmless:
        place = message.location["url"]
        watched.complaints.append(f"{message.type}: {message.text} ({place})")
