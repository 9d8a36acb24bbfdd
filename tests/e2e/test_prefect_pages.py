"""A person starts, schedules, stops and repeats trainings on Prefect's pages, in a real browser.

`make e2e` does this in one of Prefect's two UIs, and `make faults` in both. `make test` calls the
same operations without a browser: tests/supervision/test_stop_requests.py and its neighbours.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from lachesis.base.json_text import Json
from lachesis.operations.run_lists import list_runs
from lachesis.operations.runs import get_run
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from tests.e2e.prefect_pages import CHROMIUM, NO_CHROMIUM, OPTIONAL, UI, PrefectPages, open_page
from tests.harness.prefect_api import Server
from tests.harness.waiting import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.pages,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM),
]
SMALL = "batch_size=16\ngroup_size=4\nsave_checkpoint_interval=2\ntinker.final_evaluation=false"


@pytest.fixture(scope="module")
def server(served_home):
    return Server(served_home)


@pytest.fixture(scope="module")
def page():
    with open_page() as opened:
        yield opened


@pytest.fixture(params=[pytest.param("V1", marks=pytest.mark.matrix), "V2"])
def pages(request, page, server):
    ui: UI = request.param
    return PrefectPages(page, server.url.removesuffix("/api"), ui)


class Person:
    """Follow a training that a person started on a page."""

    def __init__(self, pages, server, home, cli, environments):
        self.pages, self.server, self.home, self.cli = pages, server, home, cli
        self.environments = environments
        self.store = RunStore(home)

    def find_run(self, flow_run_id):
        """The run of a flow run, which is made when the flow begins."""

        def find():
            records = self.store.all()
            return next((one for one in records if one.flow_run_id == flow_run_id), None)

        record: RunRecord = self.server.wait_for(find, 60, f"the run of {flow_run_id}")
        return record

    def validate(self):
        """Test the model that some trainings require to be tested."""
        words = ("calm", "--model", "tiny", "--steps", "4")
        return self.cli("test", *words, LACHESIS_ENVIRONMENTS=self.environments)

    def train(self, record, step):
        """Wait until the run has made this step, and return its last one."""
        self.pages.page.goto("about:blank")  # A page of a living run takes a third of a core.
        metrics = self.store.dir(record.run_id).metrics

        def last_step():
            return len(metrics.read_text().splitlines()) if metrics.exists() else 0

        self.server.wait_for(lambda: last_step() >= step, 150, f"step {step} of {record.run_id}")
        return last_step()

    def press(self, record, action, state, status):
        """Press a button; the page shows the state and `lachesis status` the word."""
        self.pages.open_flow_run(record.flow_run_id or "")
        self.pages.press(action)
        self.expect(record, state, status)

    def expect(self, record, state, status):
        """Wait until the page shows the state, and every view of the run the status."""
        store = RunStore(self.home)
        self.pages.expect_state(state)
        self.server.wait_for(
            lambda: get_run(store, record.run_id).status == status,
            90,
            f"{status} of {record.run_id}",
        )
        listed = {one.run_id: one.status for one in list_runs(store)}
        assert listed[record.run_id] == status
        assert self.server.state(record.flow_run_id or "")["name"] == state


@pytest.fixture
def person(pages, server, served_home, cli, calm):
    return Person(pages, server, served_home, cli, calm)


def fill_in(pages, values):
    """Fill in fields by their titles."""
    for title, value in values.items():
        if value is True:
            pages.switch_on(title + OPTIONAL)
        elif title == "Profile":
            pages.choose(title + OPTIONAL, value)
        else:
            pages.fill(title + OPTIONAL, str(value))


def start_by_hand(person, pages, server, steps):
    """Fill in the form of `train`, submit it, and return the run."""
    pages.open_form(server.deployment("train"))
    pages.choose("Environment", "calm")
    fill_in(pages, {"Steps": steps, "Model": "tiny", "Name": "by hand", "Settings": SMALL})
    record = person.find_run(pages.submit())
    assert (record.name, record.total_steps, record.environment) == ("by hand", steps, "calm")
    return record


def test_every_button_of_a_run(person, pages, server):
    """A training is suspended, retried, fails, is retried again and cancelled."""
    record = start_by_hand(person, pages, server, 5000)
    person.train(record, 5)

    person.press(record, "Suspend", "Cancelled", "stopped")
    assert "suspended in Prefect" in (person.store.load(record.run_id).error or "")
    person.press(record, "Retry", "Running", "running")
    steps = person.train(record, person.train(record, 5) + 3)

    trainer = person.store.load(record.run_id).services["trainer"].pid
    assert trainer is not None
    pages.open_flow_run(record.flow_run_id or "")
    os.kill(trainer, signal.SIGKILL)
    person.expect(record, "Failed", "failed")
    person.press(record, "Retry", "Running", "running")
    resumed = person.store.load(record.run_id)
    assert resumed.attempt == 3
    person.train(record, steps)

    person.press(record, "Cancel", "Cancelled", "stopped")


def test_a_copy_has_a_value_in_every_field(person, pages, server):
    """The form that Prefect has filled in with the values of the original is completed."""
    with ThreadPoolExecutor() as pool:
        validation = pool.submit(person.validate)
        original = start_by_hand(person, pages, server, 2)
        person.server.ended(original.flow_run_id or "", 150)
        validation.result()
    pages.open_flow_run(original.flow_run_id or "")
    pages.copy()
    values: Json = {
        "Profile": "embedded",
        "Steps": 2,
        "Name": "the copy",
        "Seed": 7,
        "From checkpoint": original.run_id,
        "Require validation": True,
        "Hours": 1.5,
        "Tokens": 9_000_000,
        "US dollars": 2,
    }
    fill_in(pages, values)
    flow_run_id = pages.submit()
    copy = person.find_run(flow_run_id)
    assert copy.run_id != original.run_id
    flow_run = person.server.ask("GET", f"/flow_runs/{flow_run_id}")
    assert flow_run["parameters"] == {
        "environment": "calm",
        "profile": "embedded",
        "steps": 2,
        "model": "tiny",
        "name": "the copy",
        "seed": 7,
        "from_checkpoint": original.run_id,
        "require_validation": True,
        "settings": SMALL,
        "limits": {"max_hours": 1.5, "max_tokens": 9_000_000, "max_cost_usd": 2},
        "by_agent": False,
        "confirmed": False,
        "without_validation": False,
    }

    def list_run_tags():
        tags = person.server.ask("GET", f"/flow_runs/{flow_run_id}")["tags"]
        return [tag for tag in tags if tag.startswith("run:")]

    # Prefect copies the tags, and the flow puts its own in their place when it begins.
    wait_until(lambda: list_run_tags() == [f"run:{copy.run_id}"], 60, list_run_tags)
    pages.open_flow_run(flow_run_id)
    person.server.ended(flow_run_id, 150)
    person.expect(copy, "Completed", "completed")


def test_a_schedule_with_overrides_is_skipped_while_its_training_lives(person, pages, server):
    parameters = {
        "environment": "calm",
        "steps": 5000,
        "model": "tiny",
        "name": "by a schedule",
        "settings": SMALL,
    }
    pages.open_new_schedule(server.deployment("train"), 20, list(parameters))
    pages.choose("Environment" + OPTIONAL, "calm")
    titles: Json = {"Model": "tiny", "Name": "by a schedule", "Settings": SMALL}
    fill_in(pages, {"Steps": 5000, **titles})
    schedule = pages.save_schedule()
    name = f"person-{schedule['id'][:8]}"
    try:
        assert schedule["parameters"] == parameters

        def find_runs():
            runs = [one for one in person.store.all() if one.schedule == name]
            return sorted(runs, key=lambda one: one.created_at)

        first, skipped = server.wait_for(
            lambda: runs[:2] if len(runs := find_runs()) > 1 else None, 120, "two runs"
        )
    finally:
        path = f"/deployments/{server.deployment('train')}/schedules/{schedule['id']}"
        server.ask("DELETE", path)
    assert (first.name, first.total_steps) == ("by a schedule", 5000)
    pages.open_flow_run(skipped.flow_run_id or "")
    person.expect(skipped, "Skipped", "stopped")
    reason = person.store.load(skipped.run_id).error or ""
    assert f"run {first.run_id} of the schedule {name} still runs" in reason

    person.train(first, 1)
    person.press(first, "Cancel", "Cancelled", "stopped")
