"""Take the pictures of the documentation: `python -m docs_generator.screenshots pages prefect`.

`pages` shows recorded real runs, which come with the tests, on the pages of `lachesis ui`.
`prefect` trains two models and shows them on the pages of Prefect, the newer page in light colours
and the older one in dark. Both need Chromium.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from docs_generator.site import DOCS
from lachesis.prefect_client.background_serve import find_running_server
from lachesis.prefect_client.resources import PrefectApi
from lachesis.runs.store import RunStore
from lachesis.tiny_model.build import READY_MADE
from lachesis.web.app import create_app
from tests.e2e.prefect_pages import CHROMIUM, FLAGS, UI, PrefectPages
from tests.harness.browser import serve
from tests.web.real_runs import BROKEN, GOOD, SLOW, SMALL_GROUPS, unpack_runs

IMAGES = DOCS / "images"
# A picture of a page has few colours, so this makes its file half as large.
MAX_COLOURS = 256
FORM_VALUES = {"Steps": "300", "Name": "sums by hand", "Seed": "7"}


@dataclasses.dataclass(frozen=True)
class Picture:
    """Describe one picture of a page."""

    name: str
    path: str
    width: int = 1280
    height: int = 1000
    is_dark: bool = False


COMPARED = ",".join((GOOD, SLOW, SMALL_GROUPS))
OUR_PAGES = (
    Picture("pages-runs-light", f"/runs?ticked={COMPARED}", height=740),
    Picture("pages-run-dark", f"/runs/{GOOD}", is_dark=True),
    Picture("pages-compare-light", f"/compare?runs={COMPARED}", height=1250),
    Picture("pages-rollouts-light", f"/runs/{GOOD}/rollouts?ask=wrong"),
    Picture("pages-broken-light", f"/runs/{BROKEN}", height=1330),
    Picture("pages-phone-light", f"/runs/{GOOD}", width=390),
)


def take_page_pictures() -> None:
    """Take the pictures of our own pages."""
    (model,) = READY_MADE.glob("tiny-*")
    with tempfile.TemporaryDirectory() as folder:
        store = unpack_runs(Path(folder), model)
        with serve(create_app(store=store)) as address:
            for picture in OUR_PAGES:
                with _open_page(picture) as page:
                    page.goto(address + picture.path)
                    # Curves are drawn after the page is there.
                    page.wait_for_timeout(1500)
                    _save(page, picture.name)


def take_prefect_pictures() -> None:
    """Take the pictures of Prefect's pages, with a run that has ended and one that trains."""
    with tempfile.TemporaryDirectory() as folder, _serve_home(Path(folder)) as address:
        store = RunStore(Path(folder))
        _run_lachesis("train", "arithmetic", "--name", "first sums", "--steps", "60", "--watch")
        ended = store.all()[0].flow_run_id
        _run_lachesis("train", "arithmetic", "--name", "more sums", "--steps", "3000")
        living = store.all()[0]
        # The verdict is published every half minute.
        _wait_for_step(store, living.run_id, 40)
        time.sleep(35)
        pictures = [
            Picture("prefect-deployments", "/deployments", height=460),
            Picture("prefect-dashboard", "/dashboard?tags=lachesis", height=800),
        ]
        # Headless Chromium draws no timeline on the older page.
        timelines = [
            Picture("prefect-finished", f"/runs/flow-run/{ended}", height=900),
            Picture("prefect-training", f"/runs/flow-run/{living.flow_run_id}", height=900),
        ]
        _take_prefect_pages(address, "V2", "light", [*pictures, *timelines])
        _take_prefect_pages(address, "V1", "dark", pictures)
        api = PrefectApi(f"{address}/api")
        artifact = api.find_artifact(f"verdict-{store.all()[1].run_id}", "markdown")
        picture = Picture("verdict", f"/v2/artifacts/artifact/{artifact}", 1300, height=480)
        with _open_page(picture) as page:
            page.goto(address + picture.path)
            page.wait_for_timeout(3000)
            _save(page, picture.name)
        _run_lachesis("stop", living.run_id, "--now")


def _take_prefect_pages(address: str, ui: UI, suffix: str, pictures: list[Picture]) -> None:
    """Take pictures of one of Prefect's pages, and of the form with some values in it."""
    deployment = httpx.get(f"{address}/api/deployments/name/train/train").json()["id"]
    form = Picture("prefect-form", "", height=1500)
    for picture in (*pictures, form):
        with _open_page(dataclasses.replace(picture, is_dark=suffix == "dark")) as page:
            prefect = PrefectPages(page, address, ui)
            if picture is form:
                _fill_in_form(prefect, deployment)
            else:
                prefect.visit(picture.path)
            page.wait_for_timeout(4000)
            _save(page, f"{picture.name}-{suffix}")


def _fill_in_form(prefect: PrefectPages, deployment: str) -> None:
    prefect.open_form(deployment)
    prefect.choose("Environment", "arithmetic")
    for title, value in FORM_VALUES.items():
        prefect.fill(f"{title} (Optional)", value)


@contextlib.contextmanager
def _serve_home(home: Path) -> Iterator[str]:
    """The address of a Prefect server with a runner, for an empty home."""
    os.environ |= {"LACHESIS_HOME": str(home), "LACHESIS_PAGES_PORT": "0"}
    launcher = subprocess.Popen(
        [sys.executable, "-m", "lachesis.cli.main", "serve"], stdout=subprocess.DEVNULL
    )
    try:
        while (server := find_running_server()) is None:
            time.sleep(0.5)
        yield str(server["ui_url"])
    finally:
        launcher.terminate()
        launcher.wait()


def _run_lachesis(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "lachesis.cli.main", *words], check=True)


def _wait_for_step(store: RunStore, run_id: str, step: int) -> None:
    """Wait until a run has made a step."""
    metrics = store.dir(run_id).metrics
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        time.sleep(1)


@contextlib.contextmanager
def _open_page(picture: Picture) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(
            viewport={"width": picture.width, "height": picture.height},
            color_scheme="dark" if picture.is_dark else "light",
            reduced_motion="reduce",
        )
        yield page
        browser.close()


def _save(page: Page, name: str) -> None:
    """Save what is seen of the page with few colours."""
    file = IMAGES / f"{name}.png"
    page.screenshot(path=file)
    image = Image.open(file).convert("RGB")
    image.quantize(MAX_COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"took {file.relative_to(DOCS.parent)}")


def main() -> None:
    """Take the pictures that the command line names."""
    subjects = {"pages": take_page_pictures, "prefect": take_prefect_pictures}
    for word in sys.argv[1:] or subjects:
        subjects[word]()


if __name__ == "__main__":
    main()
