"""Reports of one file in headless Chromium: nothing is loaded, and the curves are alive."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from lachesis.cli.commands import run_status
from lachesis.cli.main import main
from lachesis.runs.store import RunStore
from tests.harness.browser import CHROMIUM, NO_CHROMIUM, open_page
from tests.web.real_runs import BROKEN, GOOD, SLOW, SMALL_GROUPS, unpack_runs
from tests.web.recorded import SCRIPT
from tests.web.test_browser import assert_fits, wait_for_curves

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
SIZES = pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (390, True)])


@pytest.fixture
def store(clean_environment):
    return unpack_runs(clean_environment)


def assert_whole(browser, file):
    """Fail if the page needs anything beside its file, or names a folder of a machine."""
    assert_fits(browser)
    browser.assert_calm()
    assert [url for url in browser.requests if not url.startswith(("blob:", "data:"))] == [
        file.as_uri()
    ]
    text = file.read_text()
    assert not re.findall(r'(?:src|href)="(?!#)', text)
    assert "/home/user" not in text


@SIZES
def test_the_report_of_a_run_is_one_living_file(
    chromium: Browser, store: RunStore, tmp_path: Path, width: int, is_dark: bool
) -> None:
    store.update(GOOD, note=SCRIPT)
    assert main(["report", GOOD, "--to", str(tmp_path)]) == 0
    file = tmp_path / "report.html"
    with open_page(chromium, "file://", width=width, is_dark=is_dark) as browser:
        page = browser.page
        browser.visit(str(file))
        expect(page.locator(".lead")).to_contain_text("It learned. In 100 steps the reward rose")
        wait_for_curves(browser, 5)
        output = page.locator("#chart-reward output")
        smoothed = output.inner_text()
        page.get_by_role("group", name="Smoothing").get_by_text("1", exact=True).click()
        expect(output).not_to_have_text(smoothed)
        page.get_by_role("group", name="Horizontal axis").get_by_text("tokens").click()
        expect(page.get_by_text("The end, steps 67 to 100: the worst and")).to_be_visible()
        expect(page.get_by_text("Held-out answers after step 100, the worst")).to_be_visible()
        expect(page.get_by_text("lachesis train arithmetic").first).to_be_visible()
        expect(page.get_by_text("What was run")).to_be_visible()
        assert page.title().startswith("arithmetic")
        assert_whole(browser, file)


@SIZES
def test_the_comparison_of_runs_is_one_living_file(
    chromium: Browser, store: RunStore, tmp_path: Path, width: int, is_dark: bool
) -> None:
    file = tmp_path / "comparison.html"
    assert main(["report", GOOD, SLOW, SMALL_GROUPS, "--to", str(tmp_path)]) == 0
    with open_page(chromium, "file://", width=width, is_dark=is_dark) as browser:
        browser.visit(str(file))
        expect(browser.page.locator(".lead")).to_contain_text("A and C are best")
        wait_for_curves(browser, 4)
        assert_whole(browser, file)


def test_the_report_of_a_broken_run_begins_with_the_reason(store, tmp_path, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(run_status.webbrowser, "open", lambda url: opened.append(url) or True)
    assert main(["report", BROKEN, "--to", str(tmp_path), "--open"]) == 0
    assert opened == [(tmp_path / "report.html").as_uri()]
    assert "had no usable score, since step 46" in (tmp_path / "report.html").read_text()
