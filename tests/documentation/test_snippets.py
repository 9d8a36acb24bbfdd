"""What the pages tell a reader to type works, in order, in an empty home."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lachesis.supervision.ports import reserve_free_ports
from tests.documentation.snippets import list_commands, list_pages, read_snippets, run_page

# Pages that train on environments of their own, for several minutes.
LONG_PAGES = ("start/your-own-environment.md", "how-to/write-an-environment.md")
TUTORIAL = LONG_PAGES[0]
RUNNABLE_PAGES = [
    page for page in list_pages() if any(not snippet.skip_reason for snippet in read_snippets(page))
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty home for all pages, in which a reader goes on from page to page."""
    home = tmp_path_factory.mktemp("reader") / "home"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "WANDB_API_KEY", "PREFECT_API_URL"):
            patch.delenv(name, raising=False)
        patch.setenv("LACHESIS_HOME", str(home))
        patch.setenv("LACHESIS_PAGES_PORT", str(reserve_free_ports(1)[0]))
        yield home
        subprocess.run(
            [sys.executable, "-m", "lachesis.cli.main", "serve", "--stop"], timeout=200, check=True
        )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in RUNNABLE_PAGES if page not in LONG_PAGES])
def test_the_commands_of_a_page_run(page: str, home: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", LONG_PAGES)
def test_the_commands_of_a_long_page_run(page: str, home: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    run_page(page, tmp_path)
    print(f"{page} takes {time.monotonic() - started:.0f} s")


def test_a_block_that_is_not_run_says_why() -> None:
    reasons = [
        snippet.skip_reason
        for page in list_pages()
        for snippet in read_snippets(page)
        if snippet.skip_reason
    ]
    assert len(reasons) > 10
    assert all(len(reason.split()) > 2 for reason in reasons)


def test_a_command_may_take_several_lines() -> None:
    assert list_commands("$ a \\\n    b\noutput\n$ c\n") == ["a \\\n    b", "c"]
