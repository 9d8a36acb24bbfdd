"""The pages in headless Chromium, by mouse and keyboard, wide and narrow, light and dark."""

import re
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from lachesis.runs.metrics import MetricsFile
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.web.app import create_app
from tests.harness.browser import CHROMIUM, NO_CHROMIUM, open_page, serve
from tests.harness.home import create_run
from tests.harness.waiting import wait_until
from tests.web.recorded import BEST, FAILED, LIVING, SLOW, make_metrics

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
TOKEN = "the token of this home"


@pytest.fixture
def browser(chromium, store):
    with serve(create_app(store=store)) as address, open_page(chromium, address) as browser:
        yield browser


def assert_fits(browser):
    """Fail if the page scrolls sideways."""
    width = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    needed, available = browser.page.evaluate(width)
    assert needed <= available, browser.page.url


def wait_for_curves(browser, count=1):
    """Wait until at least so many curves are drawn."""
    browser.page.locator(".plot canvas").nth(count - 1).wait_for()


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (390, True)])
def test_a_person_clicks_through_all_pages(chromium, store, width, is_dark):
    with (
        serve(create_app(store=store)) as address,
        open_page(chromium, address, width=width, is_dark=is_dark) as browser,
    ):
        page = browser.page
        browser.visit("/")
        expect(page.locator(".lead").first).to_contain_text("Two of 4 runs need a look.")
        assert_fits(browser)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(15, 18, 22)" if is_dark else "rgb(255, 255, 255)")
        page.locator(f"#open-{BEST}").click()
        expect(page.locator(".lead")).to_contain_text("It learned.")
        wait_for_curves(browser, 2)
        assert_fits(browser)
        for tab in ("Rollouts", "Metrics", "Logs", "Settings", "Overview"):
            page.get_by_role("navigation", name="This run").get_by_text(tab).click()
            expect(page.locator(".tabs [aria-current]")).to_have_text(tab)
            assert_fits(browser)
        page.get_by_role("navigation", name="Pages").get_by_text("Environments").click()
        expect(page.locator(".lead")).to_contain_text("environments")
        assert_fits(browser)
        page.get_by_role("navigation", name="Pages").get_by_text("Runs").click()
        for run_id in (SLOW, BEST):
            page.locator(f"#tick-{run_id}").check()
        expect(page.locator(f"#run-{SLOW} .letter")).to_have_text("A")
        assert_fits(browser)
        page.locator("#tray a").click()
        expect(page.locator(".lead")).to_contain_text("B is best:")
        wait_for_curves(browser, 2)
        assert_fits(browser)
        browser.visit(f"/runs/{FAILED}")
        expect(page.locator(".lead")).to_contain_text("It failed.")
        assert page.title().startswith("sums")
        browser.assert_calm()


def test_filters_act_at_once_and_stand_in_the_address(browser):
    page = browser.page
    browser.visit("/runs")
    page.locator("#search").fill("learning_rate<0.001")
    expect(page.locator("tr[data-run]")).to_have_count(1)
    expect(page).to_have_url(re.compile(r"/runs\?q=learning_rate<0\.001|q=learning_rate%3C0.001"))
    page.locator("#search").fill("nothing-like-it")
    expect(page.get_by_text("None of the 4 runs matches.")).to_be_visible()
    page.locator("#list .chips a").click()
    expect(page.locator("tr[data-run]")).to_have_count(4)
    page.locator("select[name=health]").select_option("look")
    expect(page.locator("tr[data-run]")).to_have_count(2)
    page.go_back()
    expect(page.locator("tr[data-run]")).to_have_count(4)
    page.get_by_role("link", name="Held out, 95 %").click()
    expect(page.locator("tr[data-run]").first).to_have_attribute("data-run", BEST)
    browser.assert_calm()


def test_ticks_stay_while_the_list_is_filtered_and_sorted(browser):
    page = browser.page
    browser.visit("/runs")
    page.locator(f"#tick-{BEST}").check()
    page.get_by_role("link", name="Took").click()
    expect(page.locator(f"#tick-{BEST}")).to_be_checked()
    page.locator("select[name=state]").select_option("failed")
    expect(page.locator("tr[data-run]")).to_have_count(1)
    page.locator(f"#tick-{FAILED}").check()
    expect(page.locator("#tray a")).to_have_text("Compare 2 runs")
    page.reload()
    expect(page.locator("#tray li")).to_have_count(2)
    page.get_by_text("Clear", exact=True).click()
    expect(page.locator("#tray")).to_be_hidden()
    browser.assert_calm()


def test_everything_is_reached_by_keyboard(browser):
    page = browser.page
    browser.visit("/runs")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.press("Tab")
    page.locator("body").click()
    for key in ("j", "j", "x", "j", "x"):
        page.keyboard.press(key)
    expect(page.locator("#tray li")).to_have_count(2)
    page.keyboard.press("k")
    expect(page.locator(f"#open-{BEST}")).to_be_focused()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("c")
    expect(page).to_have_url(re.compile(r"/compare\?runs="))
    browser.visit(f"/runs/{BEST}/rollouts")
    page.locator("body").click()
    page.keyboard.press("]")
    expect(page).to_have_url(re.compile("group=1-0"))
    browser.assert_calm()


def test_curves_are_smoothed_zoomed_and_saved(browser):
    page = browser.page
    browser.visit(f"/runs/{BEST}?mean=5")
    wait_for_curves(browser, 2)
    output = page.locator("#chart-reward output")
    expect(output).to_have_text("0.667")  # the mean of the last three steps
    page.get_by_role("group", name="Smoothing").get_by_text("1", exact=True).click()
    expect(output).to_have_text("0.900")
    expect(page).to_have_url(re.compile("mean=1"))
    page.get_by_role("group", name="Horizontal axis").get_by_text("tokens").click()
    expect(page).to_have_url(re.compile("x=tokens"))
    page.get_by_role("group", name="Horizontal axis").get_by_text("steps").click()
    plot = page.locator("#chart-reward .plot")
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile("from=.*to="))
    with page.expect_response(lambda answer: "x=step" in answer.url and "from" not in answer.url):
        page.keyboard.press("Escape")
    expect(page).not_to_have_url(re.compile("from="))
    plot.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#said")).to_contain_text("0.9")
    page.locator("#chart-reward summary").click()
    with page.expect_download() as download:
        page.locator("#chart-reward [data-png]").click()
    assert download.value.suggested_filename == f"reward-{BEST}.png"
    page.locator("#chart-reward summary").click()
    page.locator("#chart-reward [data-log]").click()
    expect(page).to_have_url(re.compile("log=reward"))
    page.reload()
    wait_for_curves(browser, 2)
    expect(page.locator("#chart-reward [data-log]")).to_have_text("Linear scale")
    page.go_back()
    expect(page.locator("#chart-reward [data-log]")).to_have_text("Log scale")
    with page.expect_download() as download:
        page.locator("#chart-reward summary").click()
        page.get_by_role("link", name="Save as CSV").first.click()
    assert "reward/mean" in Path(download.value.path()).read_text()
    browser.assert_calm()


def test_a_page_grows_while_its_run_trains(browser, store):
    page = browser.page
    browser.visit(f"/runs/{LIVING}?mean=1")
    wait_for_curves(browser)
    page.wait_for_timeout(1500)
    output = page.locator("#chart-reward output")
    expect(output).to_have_text("0.200")
    MetricsFile(store.dir(LIVING).metrics).append(3, make_metrics(3, 0.75))
    written_at = time.monotonic()
    expect(output).to_have_text("0.750")
    assert time.monotonic() - written_at < 4, "a page asks every two seconds"
    expect(page.locator("#live")).to_have_text("step 3")
    store.update(LIVING, status="completed", health={"word": "healthy", "final": True})
    expect(page.locator(".lead")).to_contain_text("It learned.")
    expect(page.locator("#verdict .facts")).to_contain_text("3 of 10")
    browser.assert_calm()


def test_a_log_grows_while_its_run_trains(browser, store):
    page, log = browser.page, store.dir(LIVING).get_log_file("trainer")
    log.write_text("".join(f"line {number}\n" for number in range(150)))
    browser.visit(f"/runs/{LIVING}/logs/trainer")
    lines = page.locator("#log-lines")
    lines.focus()
    is_at_end = "innerHeight + scrollY >= document.documentElement.scrollHeight"
    wait_until(lambda: page.keyboard.press("End") or page.evaluate(is_at_end), 20)
    with log.open("a") as file:
        file.write("<b>ValueError: it broke</b>\n")
    expect(lines.locator("mark")).to_have_text("<b>ValueError: it broke</b>")
    expect(lines.locator("mark")).to_be_in_viewport()
    assert lines.text_content().splitlines()[0] == "line 0"  # type: ignore[union-attr]
    store.update(LIVING, status="failed", error="it broke")
    expect(page.locator(".path")).to_contain_text("failed")
    browser.visit(f"/runs/{LIVING}/logs/trainer?q=broke")
    expect(lines).to_have_text("<b>ValueError: it broke</b>")
    browser.assert_calm()


def test_the_first_step_brings_the_curves(browser, store):
    metrics = MetricsFile(store.dir(LIVING).metrics)
    metrics.path.write_text("")
    page = browser.page
    browser.visit(f"/runs/{LIVING}")
    expect(page.locator("#curves")).to_have_count(0)
    for step in (1, 2):
        metrics.append(step, make_metrics(step, 0.4))
    wait_for_curves(browser)
    expect(page.locator("#chart-reward output")).to_have_text("0.400")
    browser.assert_calm()


def test_what_a_person_types_opens_and_selects_stays(browser, store):
    page, metrics = browser.page, MetricsFile(store.dir(LIVING).metrics)
    browser.visit(f"/runs/{LIVING}")
    wait_for_curves(browser)
    page.locator("#chart-reward summary").click()
    search = page.get_by_role("searchbox", name="Search this log")
    search.fill("trace")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('h1'))")
    search.focus()
    metrics.append(3, make_metrics(3, 0.75))
    expect(page.locator("#live")).to_have_text("step 3")
    expect(search).to_have_value("trace")
    expect(search).to_be_focused()
    expect(page.locator("#chart-reward [data-png]")).to_be_visible()
    browser.assert_calm()


def test_a_hidden_page_does_not_ask(browser):
    page = browser.page
    browser.visit(f"/runs/{LIVING}")
    wait_for_curves(browser)
    hide = "Object.defineProperty(document, 'hidden', {get: () => true, configurable: true})"
    page.evaluate(hide)
    page.wait_for_timeout(500)
    num_requests = len(browser.requests)
    page.wait_for_timeout(4500)
    assert len(browser.requests) == num_requests
    page.evaluate("delete document.hidden")
    with page.expect_response(lambda answer: answer.status == 304):
        pass
    browser.assert_calm()


def test_letters_that_act_as_keys_are_switched_off(browser):
    page = browser.page
    browser.visit("/runs")
    page.keyboard.press("?")
    page.get_by_label("Single letters act as keys").uncheck()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.reload()
    page.keyboard.press("/")
    expect(page.locator("#search")).not_to_be_focused()
    page.keyboard.press("?")
    page.get_by_label("Single letters act as keys").check()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()


def test_the_list_follows_the_runs(browser, store):
    page = browser.page
    browser.visit("/runs")
    page.locator(f"#tick-{BEST}").check()
    store.update(LIVING, status="failed", error="it broke")
    expect(page.locator(f"#run-{LIVING}")).to_contain_text("failed", timeout=15_000)
    expect(page.locator(f"#tick-{BEST}")).to_be_checked()
    browser.assert_calm()


def test_a_server_that_is_gone_is_told_and_found_again(chromium, store):
    port = reserve_free_ports(1)[0]
    with open_page(chromium, f"http://127.0.0.1:{port}") as browser:
        page = browser.page
        with serve(create_app(store=store), port):
            browser.visit(f"/runs/{LIVING}?mean=1")
            wait_for_curves(browser)
        strip = page.locator("#lost")
        expect(strip).to_contain_text("No connection. What you see is of", timeout=30_000)
        announcement = strip.text_content()
        page.wait_for_timeout(4500)
        expect(strip).to_have_text(announcement or "", timeout=1)  # it is read aloud once
        MetricsFile(store.dir(LIVING).metrics).append(3, make_metrics(3, 0.75))
        with serve(create_app(store=store), port):
            expect(strip).to_be_hidden()
            expect(page.locator("#chart-reward output")).to_have_text("0.750")
        # A browser reports a refused connection as an error of the page, and so does htmx.
        assert all("ERR_" in text or "htmx:sendError" in text for text in browser.complaints)


def test_a_stranger_types_the_token(chromium, store):
    with (
        serve(create_app(store=store, token=TOKEN)) as address,
        open_page(chromium, address) as browser,
    ):
        page = browser.page
        browser.visit(f"/runs/{BEST}")
        expect(page.locator(".lead")).to_contain_text("Sign in to Lachesis.")
        assert BEST not in page.locator("body").inner_text()
        page.get_by_label("Token").fill("wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator(".lead")).to_contain_text("the token belongs to another home")
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator(".lead")).to_contain_text("It learned.")
        assert all("401" in complaint for complaint in browser.complaints)


def test_a_choice_of_colours_is_kept(browser):
    page = browser.page
    browser.visit(f"/runs/{BEST}")
    wait_for_curves(browser)
    button = page.locator("[data-theme-button]")
    button.click()
    button.click()
    browser.visit("/runs")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    browser.assert_calm()


def test_without_scripts_all_text_and_links_remain(chromium, store):
    with serve(create_app(store=store)) as address, open_page(chromium, address) as browser:
        chromium = browser.page.context.browser
        assert chromium is not None
        context = chromium.new_context(java_script_enabled=False)
        page = context.new_page()
        page.goto(f"{address}/runs")
        page.locator(f"#tick-{BEST}").check()
        page.locator(f"#tick-{SLOW}").check()
        page.get_by_role("button", name="Compare the ticked runs").click()
        expect(page.locator(".lead")).to_contain_text("is best:")
        page.goto(f"{address}/runs")
        page.locator("#search").fill("night")
        page.get_by_role("button", name="Filter").click()
        expect(page.locator("tr[data-run]")).to_have_count(1)
        context.close()


def test_the_axis_of_a_run_has_only_whole_steps(browser, store):
    run_id = create_run(store, steps=[0.5] * 25).run_id
    browser.page.add_init_script("""
        const draw = CanvasRenderingContext2D.prototype.fillText;
        window.words = [];
        CanvasRenderingContext2D.prototype.fillText = function (word, ...at) {
            words.push(word);
            draw.call(this, word, ...at);
        };
    """)
    browser.visit(f"/runs/{run_id}")
    wait_for_curves(browser)
    words = set(browser.page.evaluate("words"))
    # Ticks at 2.5 and 7.5 would be called 3 and 8.
    assert words >= {"5", "10", "15", "20", "25"}
    assert not words & {"3", "8", "2.5"}
