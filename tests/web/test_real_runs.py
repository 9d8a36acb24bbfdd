"""Questions that a new user has, answered on the pages of four real runs without a command line."""

import re

import pytest
from playwright.sync_api import expect

from lachesis.web.app import create_app
from tests.harness.browser import CHROMIUM, NO_CHROMIUM, Watched, open_page, serve
from tests.web.real_runs import BROKEN, GOOD, SLOW, SMALL_GROUPS, unpack_runs
from tests.web.test_browser import assert_fits, wait_for_curves

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)


@pytest.fixture(scope="module")
def address(tmp_path_factory, tiny_model):
    """The pages of the runs; nothing is written, so that all tests may share them."""
    (model,) = (tiny_model / "models").glob("tiny-*")
    store = unpack_runs(tmp_path_factory.mktemp("recorded"), model)
    with serve(create_app(store=store)) as address:
        yield address


SCREENS = {
    "wide light": (1280, False),
    "wide dark": (1280, True),
    "phone light": (390, False),
    "phone dark": (390, True),
}
on_every_screen = pytest.mark.parametrize(
    "browser",
    [
        SCREENS["wide light"],
        pytest.param(SCREENS["wide dark"], marks=pytest.mark.long),
        pytest.param(SCREENS["phone light"], marks=pytest.mark.long),
        SCREENS["phone dark"],
    ],
    ids=list(SCREENS),
    indirect=True,
)
# A click does the same in both colours.
on_two_screens = pytest.mark.parametrize(
    "browser",
    [SCREENS["wide light"], SCREENS["phone dark"]],
    ids=["wide light", "phone dark"],
    indirect=True,
)


@pytest.fixture
def browser(chromium, request, address):
    width, is_dark = request.param
    with open_page(chromium, address, width=width, is_dark=is_dark) as browser:
        yield browser
        assert_fits(browser)
        browser.assert_calm()


@on_two_screens
def test_which_of_three_runs_was_best_and_what_was_different(browser: Watched) -> None:
    page = browser.page
    browser.visit("/")
    expect(page.locator(".lead").first).to_contain_text("One of 4 runs needs a look.")
    for run_id in (GOOD, SLOW, SMALL_GROUPS):
        page.locator(f"#tick-{run_id}").check()
    page.locator("#tray a").click()
    lead = page.locator(".lead")
    expect(lead).to_contain_text("A and C are best, and 20 items cannot tell them apart:")
    expect(lead).to_contain_text("0.781 and 0.766 held out, and they differ in group_size.")
    expect(lead).to_contain_text("B is 0.33 behind, with learning_rate 0.0003.")
    wait_for_curves(browser, 3)
    assert_fits(browser)


@on_two_screens
def test_wrong_answers_at_the_end_and_why_they_scored_0(browser: Watched) -> None:
    page = browser.page
    browser.visit(f"/runs/{GOOD}")
    page.get_by_text("Read answers that are wrong").click()
    expect(page.locator(".lead")).to_contain_text("held-out answers are wrong.")
    expect(page.locator("#opened h2")).to_contain_text("Step 100")
    for _ in range(3):
        wrong = page.locator(".answer.down").first
        expect(wrong.locator("header")).to_contain_text("0")
        expect(wrong.locator("header")).to_contain_text("wrong")
        answer = "".join(wrong.locator(".tokens i").first.inner_text().split("\n")[:1])
        expected = page.locator(".turns div", has_text="expected").locator("dd").inner_text()
        assert expected.isdigit()
        assert answer != expected
        heading = page.locator("#opened").get_attribute("aria-label")
        page.get_by_role("link", name="Next", exact=True).first.click()
        expect(page.locator("#opened")).not_to_have_attribute("aria-label", heading or "")
    tokens = page.locator(".tokens").first
    tokens.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#inspect")).to_contain_text("probability")


@on_two_screens
def test_why_a_run_went_wrong_whose_verifier_broke(browser: Watched) -> None:
    page = browser.page
    browser.visit("/")
    page.locator(".alarms a").first.click()
    lead = page.locator(".lead")
    expect(lead).to_contain_text("Have a look.")
    expect(lead).to_contain_text("had no usable score, since step 46")
    expect(lead).to_contain_text("ZeroDivisionError at arithmetic_strict.py:84")
    wait_for_curves(browser, 5)
    expect(page.locator("#chart-raised figcaption")).to_contain_text("Groups that raised")
    shows_it = page.locator("#trouble")
    expect(shows_it.locator("#chart-raised .plot canvas")).to_be_visible()
    expect(shows_it.locator("tbody tr").first).to_contain_text("the environment raised")
    assert_fits(browser)
    page.get_by_role("navigation", name="This run").get_by_text("Logs").click()
    expect(page.locator(".log mark").first).to_contain_text(re.compile("Error"))


@on_every_screen
def test_every_page_of_each_run_fits_and_is_calm(browser: Watched) -> None:
    page = browser.page
    for run_id in (GOOD, SLOW, SMALL_GROUPS, BROKEN):
        for tab in ("", "/rollouts", "/metrics", "/logs", "/settings"):
            browser.visit(f"/runs/{run_id}{tab}")
            expect(page.locator("h1")).to_contain_text(run_id)
            assert_fits(browser)
