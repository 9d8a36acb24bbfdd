"""Operate Prefect's pages in headless Chromium, by mouse and keyboard, in both of its UIs.

The words on the pages are Prefect's own. Where the two UIs differ, `ui` is "V1" (served at `/`) or
"V2" (served at `/v2`).
"""

import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from playwright.sync_api import Locator, Page, expect, sync_playwright

from lachesis.base.json_text import Json

UI = Literal["V1", "V2"]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
# The graph of a flow run would be drawn by software, which takes a tenth of a core.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-3d-apis"]
# Pages that wait would take a third of a core for their animations.
NO_MOTION = """
requestAnimationFrame = (draw) => setTimeout(() => draw(performance.now()), 250);
cancelAnimationFrame = clearTimeout;
addEventListener("DOMContentLoaded", () => {
    const style = document.createElement("style");
    style.textContent = "*, ::before, ::after { animation: none !important; }";
    document.head.append(style);
});
"""
NO_CHROMIUM = "no Chromium on this machine (apt-get install chromium)"
PATIENCE_MS = 30_000
OPTIONAL = " (Optional)"
Action = Literal["Cancel", "Suspend", "Retry"]
V2_WORDS: dict[Action, tuple[str, str]] = {
    "Cancel": ("Cancel", "Cancel Flow Run"),
    "Suspend": ("Pause", "Pause Flow Run"),
    "Retry": ("Retry", "Retry"),
}
"""The item of the menu and the button that confirms it."""
V1_CONFIRMATIONS = {"Cancel": "Confirm", "Suspend": "Submit", "Retry": "Retry"}


@contextlib.contextmanager
def open_page(height: int = 1000) -> Iterator[Page]:
    """A page of a browser that ends with the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1300, "height": height}, reduced_motion="reduce")
        page.add_init_script(NO_MOTION)
        page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        yield page
        browser.close()


@dataclass
class PrefectPages:
    """The pages of one UI of a Prefect server."""

    page: Page
    address: str
    ui: UI

    def visit(self, path: str) -> None:
        self.page.goto(self.address + {"V1": "", "V2": "/v2"}[self.ui] + path)

    # --- the page of a flow run

    def open_flow_run(self, flow_run_id: str) -> None:
        self.visit(f"/runs/flow-run/{flow_run_id}")

    def expect_state(self, word: str) -> None:
        """Wait until the page shows this state, without a reload by hand."""
        expect(self.page.get_by_text(word, exact=True).first).to_be_visible()

    def press(self, action: Action) -> None:
        """Press a button of the flow run and confirm it; V1 has buttons, V2 a menu."""
        page = self.page
        if self.ui == "V1":
            page.get_by_role("button", name=action, exact=True).click()
            confirmation = V1_CONFIRMATIONS[action]
        else:
            item, confirmation = V2_WORDS[action]
            self._open_menu()
            page.get_by_role("menuitem", name=item, exact=True).click()
        dialog = page.get_by_role("dialog").or_(page.get_by_role("alertdialog"))
        dialog.get_by_role("button", name=confirmation, exact=True).click()
        expect(dialog).to_be_hidden()

    def copy(self) -> None:
        """Open the form that is filled in with the values of this flow run."""
        self._open_menu()
        item = self.page.get_by_text("Copy to new run", exact=True)
        item.click()
        self.page.wait_for_url(re.compile("/run\\?"))

    def _open_menu(self) -> None:
        if self.ui == "V1":
            self.page.locator(".p-icon-button-menu button").first.click()
        else:
            self.page.get_by_role("button", name="Open menu").first.click()

    # --- the form of a deployment

    def open_form(self, deployment_id: str) -> None:
        self.visit(f"/deployments/deployment/{deployment_id}/run")

    def choose(self, title: str, value: str) -> None:
        """Choose a value of a select by keyboard, and in V1 by a click at the end."""
        if self.ui == "V1":
            self._field(title).locator(".p-select-button__control").press("Space")
            self._choose_option(value)
        else:
            name = f"Select {title.removesuffix(OPTIONAL)}"
            self.page.get_by_role("button", name=name, exact=True).press("Enter")
            self.page.keyboard.type(value)
            self.page.keyboard.press("Enter")

    def fill(self, title: str, value: str) -> None:
        """Click into a field and type a value over what is there, again if the page lost a key."""
        if self.ui == "V1":
            field = self._field(title).locator("input, textarea").first
        else:
            field = self.page.get_by_label(title, exact=True)
        for _ in range(3):
            field.click()
            field.press("Control+a")
            self.page.keyboard.type(value)
            if field.input_value() == value:
                return
        raise AssertionError(f"{title} shows {field.input_value()!r} where {value!r} was typed")

    def switch_on(self, title: str) -> None:
        if self.ui == "V1":
            self._field(title).get_by_role("switch").click()
        else:
            self.page.get_by_label(title, exact=True).click()

    def submit(self) -> str:
        """Press the form's button and return the id of the flow run that it has made."""
        with self.page.expect_response(re.compile("/create_flow_run$")) as answer:
            self.page.get_by_role("button", name="Submit", exact=True).click()
        return str(answer.value.json()["id"])

    # --- the schedules of a deployment

    def open_new_schedule(
        self, deployment_id: str, seconds: int, parameters: Sequence[str]
    ) -> None:
        """Open the form of a new schedule that fires so often, with fields for these parameters."""
        self.visit(f"/deployments/deployment/{deployment_id}")
        page = self.page
        page.get_by_role("button", name="Schedule", exact=True).click()
        dialog = page.get_by_role("dialog")
        if self.ui == "V1":
            dialog.get_by_role("spinbutton").fill(str(seconds))
            dialog.get_by_role("button", name="Minutes", exact=True).press("Space")
            self._choose_option("Seconds")
            dialog.get_by_role("button", name="Select parameters to override").press("Space")
            for parameter in parameters:
                self._choose_option(parameter)
            dialog.get_by_role("heading", name="Parameter Overrides").click()  # closes the list
        else:
            dialog.get_by_label("Value", exact=True).fill(str(seconds))
            dialog.get_by_role("combobox", name="Interval").click()
            page.get_by_role("option", name="Seconds", exact=True).click()

    def save_schedule(self) -> Json:
        """Press the form's button and return the schedule that the server has made."""
        with self.page.expect_response(re.compile("/schedules$")) as answer:
            self.page.get_by_role("button", name="Save", exact=True).click()
        return dict(answer.value.json()[0])

    def _choose_option(self, value: str) -> None:
        words = re.compile(rf"^{re.escape(value)}$")
        self.page.locator(".p-select-option", has_text=words).click()

    def _field(self, title: str) -> Locator:
        """The part of a V1 form with this title: label, description and input."""
        label = f"*[contains(@class, 'schema-form-property__label')][normalize-space()='{title}']"
        part = "ancestor::div[contains(concat(@class, ' '), 'p-label ')][1]"
        return self.page.locator(f"xpath=//{label}/{part}")
