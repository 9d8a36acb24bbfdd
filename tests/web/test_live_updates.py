"""An open page asks with the tag of what it shows: 304 until a file has changed."""

import pytest

from lachesis.reporting.run_cache import RunCache
from lachesis.runs.metrics import MetricsFile
from lachesis.web.live_updates import describe_pace
from tests.web.recorded import BEST, LIVING, make_metrics

PAGES = {
    "run": f"/runs/{LIVING}",
    "log": f"/runs/{LIVING}/logs/trainer",
    "found lines": f"/runs/{LIVING}/logs/trainer?q=reward",
    "list": "/runs",
}


def ask_again(client, path, tag):
    return client.get(path, headers={"HX-Request": "true", "If-None-Match": tag}).status_code


@pytest.mark.parametrize("name", PAGES)
def test_an_unchanged_page_is_not_made_again(client, name):
    answer = client.get(PAGES[name])
    tag = answer.headers["etag"]
    assert f"{tag[1:-1]}" in answer.text, "the page sends its tag back"
    assert ask_again(client, PAGES[name], tag) == 304
    other = f"{PAGES[name]}{'&' if '?' in PAGES[name] else '?'}mean=5"
    assert ask_again(client, other, tag) == 200, "another address shows something else"


@pytest.mark.parametrize("name", ["run", "list"])
def test_a_step_and_a_note_change_a_page(client, store, name):
    tag = client.get(PAGES[name]).headers["etag"]
    MetricsFile(store.dir(LIVING).metrics).append(3, make_metrics(3, 0.5))
    assert ask_again(client, PAGES[name], tag) == 200
    tag = client.get(PAGES[name]).headers["etag"]
    store.update(LIVING, note="new")
    answer = client.get(PAGES[name], headers={"HX-Request": "true", "If-None-Match": tag})
    assert answer.status_code == 200
    assert "hx-push-url" not in answer.headers, "asking for changes is no visit"


@pytest.mark.parametrize("name", ["log", "found lines"])
def test_a_line_changes_the_page_of_a_log(client, store, name):
    tag = client.get(PAGES[name]).headers["etag"]
    with store.dir(LIVING).get_log_file("trainer").open("a") as file:
        file.write("step 2 reward 0.2\n")
    answer = client.get(PAGES[name], headers={"HX-Request": "true", "If-None-Match": tag})
    assert "step 2 reward 0.2" in answer.text


def test_the_page_of_an_ended_run_does_not_ask(client, store):
    answer = client.get(f"/runs/{BEST}")
    assert "etag" not in answer.headers
    assert 'id="poll"' not in answer.text
    tag = client.get(PAGES["run"]).headers["etag"]
    store.update(LIVING, status="completed", health={"word": "healthy", "final": True})
    last = client.get(PAGES["run"], headers={"HX-Request": "true", "If-None-Match": tag})
    assert "It learned." in last.text
    assert 'id="poll"' not in last.text


def test_steps_that_are_made_again_replace_the_old_ones(store):
    cache = RunCache(store)
    MetricsFile(store.dir(LIVING).metrics).append(3, make_metrics(3, 0.5))
    assert len(cache.read_steps(LIVING)) == 3
    # A resumed run begins after a checkpoint.
    MetricsFile(store.dir(LIVING).metrics).append(2, make_metrics(2, 0.7))
    assert [step["step"] for step in cache.read_steps(LIVING)] == [1, 2]


def test_a_step_that_is_late_is_told_with_its_age(store, monkeypatch):
    view = RunCache(store).view(LIVING)
    now = view.steps[-1]["time"]
    for age_s, text in ((1, "step 2"), (29, "step 2"), (3600, "no step for 1 h")):
        monkeypatch.setattr(
            "lachesis.reporting.run_view.time.time", lambda age_s=age_s: now + age_s
        )
        assert describe_pace(view) == text
