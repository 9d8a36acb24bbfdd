"""What the pages tell a reader to type works, in order, in an empty home."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.repository.snippets import (
    list_commands,
    list_pages,
    make_reader_env,
    read_snippets,
    run_page,
)

# Pages that start a server or train for minutes, and one that goes on from these: `make e2e` plays
# them.
LONG_PAGES = (
    "tutorials/first-run.md",
    "how-to/read-rollouts.md",
    "tutorials/your-own-environment.md",
    "how-to/write-an-environment.md",
    "how-to/test-before-training.md",
    "how-to/watch-and-compare.md",
    "how-to/stop-and-resume.md",
    "how-to/export-weights.md",
    "how-to/budgets.md",
)
RUNNABLE_PAGES = [
    page for page in list_pages() if any(not snippet.skip_reason for snippet in read_snippets(page))
]


@pytest.fixture(scope="module")
def reader_env(tmp_path_factory):
    """The variables of a reader, who goes on from page to page with one home, empty at first."""
    env = make_reader_env(tmp_path_factory.mktemp("reader") / "home")
    env["LACHESIS_PAGES_PORT"] = "0"
    yield env
    stop = [sys.executable, "-m", "lachesis.cli.main", "serve", "--stop"]
    subprocess.run(stop, env=env, timeout=200, check=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in RUNNABLE_PAGES if page not in LONG_PAGES])
def test_the_commands_of_a_page_run(page, reader_env, tmp_path):
    run_page(page, tmp_path, reader_env)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", LONG_PAGES)
def test_the_commands_of_a_long_page_run(
    page: str, reader_env: dict[str, str], tmp_path: Path
) -> None:
    started = time.monotonic()
    run_page(page, tmp_path, reader_env)
    print(f"{page} takes {time.monotonic() - started:.0f} s")


def test_a_block_that_is_not_run_says_why():
    reasons = [
        snippet.skip_reason
        for page in list_pages()
        for snippet in read_snippets(page)
        if snippet.skip_reason
    ]
    assert len(reasons) > 10
    assert all(len(reason.split()) > 2 for reason in reasons)


def test_a_command_may_take_several_lines():
    assert list_commands("$ a \\\n    b\noutput\n$ c\n") == ["a \\\n    b", "c"]
