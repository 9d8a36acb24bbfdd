"""Runs that were read are kept until their files change, and not for ever."""

import pytest

from lachesis.reporting import run_cache
from lachesis.reporting.run_cache import RunCache
from lachesis.runs.metrics import MetricsFile
from tests.web.recorded import BEST, FAILED, LIVING, SLOW, fill_home, make_metrics


@pytest.fixture
def store(clean_environment):
    return fill_home(clean_environment)


def test_what_has_changed_is_read_again(store):
    cache = RunCache(store)
    record = cache.load_record(LIVING)
    assert cache.load_record(LIVING) is record
    summary = cache.summarize(record)
    assert cache.summarize(record) is summary
    store.update(LIVING, note="new")
    assert cache.load_record(LIVING).note == "new"
    steps = cache.read_steps(LIVING)
    assert cache.read_steps(LIVING) is steps
    MetricsFile(store.dir(LIVING).metrics).append(3, make_metrics(3, 0.5))
    assert [step["step"] for step in cache.read_steps(LIVING)] == [1, 2, 3]
    assert len(steps) == 2, "a page that is being made keeps what it has"
    assert cache.summarize(cache.load_record(LIVING)).step == 3


def test_a_file_that_was_written_anew_is_read_from_its_beginning(store):
    cache = RunCache(store)
    assert len(cache.read_steps(BEST)) == 4
    store.dir(BEST).metrics.write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert [step["reward/mean"] for step in cache.read_steps(BEST)] == [0.5]
    store.dir(BEST).metrics.unlink()
    assert cache.read_steps(BEST) == []


def test_only_some_runs_are_kept(store, monkeypatch):
    monkeypatch.setattr(run_cache, "MAX_KEPT_STEPS", 2)
    monkeypatch.setattr(run_cache, "MAX_KEPT_TABLES", 1)
    cache = RunCache(store)
    for run_id in (BEST, SLOW, LIVING, FAILED):
        cache.read_steps(run_id)
        cache.read_group_table(run_id)
    assert list(cache._readers) == [LIVING, FAILED]
    assert [key for key in cache._values if key[0] == "groups"] == [("groups", FAILED)]


def test_a_run_that_is_removed_is_gone(store):
    cache = RunCache(store)
    assert len(cache.list_records()) == 4
    store.discard(SLOW)
    assert SLOW not in [record.run_id for record in cache.list_records()]


def test_the_summary_of_an_older_record_is_not_kept(store):
    """A thread that has read a record goes on with it after another one has read the next."""
    cache = RunCache(store)
    older = cache.load_record(BEST)
    store.update(BEST, note="changed")
    newer = cache.load_record(BEST)
    assert cache.summarize(older).record.note is None
    assert cache.summarize(newer).record.note == "changed"
    older = newer
    store.update(BEST, note="again")
    assert cache.summarize(older).record.note == "changed"
    assert cache.summarize(cache.load_record(BEST)).record.note == "again"
