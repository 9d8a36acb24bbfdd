"""The ledger knows what was promised and spent, whatever becomes of the runs."""

import json
import os
import shutil
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lachesis.base.errors import PolicyError, StorageError
from lachesis.config import run_config
from lachesis.launch.resume import begin_next_attempt
from lachesis.operations.runs import remove_runs
from lachesis.runs.end_causes import EndCause
from lachesis.runs.ending import end_run
from lachesis.runs.store import RunStore
from lachesis.spending import ledger as ledger_module
from lachesis.spending.agent_limits import compute_committed_cost
from lachesis.spending.ledger import has_had_run, hold_ledger, read_ledger, settle_run
from tests.harness.home import make_record

LONG_AGO = (datetime.now(UTC) - timedelta(hours=25)).isoformat()


@pytest.fixture
def store(clean_environment, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    return RunStore(clean_environment)


def start(store, limit_usd=5.0, **values):
    """Make a paid run of an agent, as a start does."""
    fields: dict[str, Any] = {"profile": "tinker", "by_agent": True, "status": "running"}
    record = make_record(run_id=store.new_id(), **{**fields, **values})
    limits = {"limits": {"max_cost_usd": limit_usd}}
    config = run_config.resolve_run_config("sums", record.profile, limits, model="Qwen/Qwen3-8B")
    with hold_ledger(store.home) as ledger:
        ledger.promise_run(store, record, limit_usd)
        store.create(record, config.to_yaml())
    return record


def end(store, record, cost_usd, *, settled=True):
    store.dir(record.run_id).spent.write_text(json.dumps({"cost_usd": cost_usd}))
    ended = end_run(store, record, EndCause.FAILED)
    if settled:
        settle_run(store, ended)
    return ended


def resume(store, record):
    """Make the next attempt of an ended run, as its owner."""
    return begin_next_attempt(store, store.load(record.run_id), {"status": "running"})[0]


def make_older(store):
    """Put everything in the ledger more than a day back."""
    file = store.home / ledger_module.FILE_NAME
    lines = [json.loads(line) | {"at": LONG_AGO} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_goes_on_counts_with_its_limit_however_long_ago_it_began(store):
    runs = [start(store) for _ in range(4)]
    make_older(store)
    assert compute_committed_cost(store) == 20
    end(store, runs[0], 1.5)
    assert compute_committed_cost(store) == 16.5
    make_older(store)
    assert compute_committed_cost(store) == 15, "it has ended more than a day ago"


@pytest.mark.parametrize("settled", [True, False])
def test_what_a_later_attempt_spends_is_not_that_of_an_earlier_one(store, settled):
    """The end of the first attempt need not be in the ledger, as when its flow was killed."""
    record = start(store, 2.0)
    end(store, record, 0.25, settled=settled)
    resumed = resume(store, record)
    assert compute_committed_cost(store) == 2.0
    store.dir(record.run_id).spent.write_text(json.dumps({"cost_usd": 1.5}))
    assert compute_committed_cost(store) == 2.0, "the limit of all attempts together"
    end(store, resumed, 1.75, settled=settled)
    assert compute_committed_cost(store) == 1.75


@pytest.mark.parametrize("settled", [True, False])
def test_an_end_is_known_with_and_without_a_line(store, settled):
    """A flow that was killed writes none."""
    end(store, start(store), 1.25, settled=settled)
    assert compute_committed_cost(store) == 1.25


def test_a_run_that_is_removed_is_not_forgotten(store):
    first, second = start(store), start(store)
    end(store, first, 1.5, settled=False)
    end(store, second, 2.0, settled=False)
    remove_runs(store, [first.run_id])
    assert compute_committed_cost(store) == 3.5
    shutil.rmtree(store.dir(second.run_id).path)
    assert compute_committed_cost(store) == 6.5, "what it has spent is not known, so all counts"
    assert has_had_run(store.home, first.run_id)
    assert not has_had_run(store.home, "00000000")


def test_only_what_an_attempt_adds_counts_for_it(store):
    ended = end(store, start(store), 3.0)
    make_older(store)
    assert compute_committed_cost(store) == 0
    resumed, _ = begin_next_attempt(store, ended, {}, by_owner=False)
    assert compute_committed_cost(store) == 2, "the run may cost 5 in all, and has cost 3"
    end(store, resumed, 4.5)
    assert compute_committed_cost(store) == 1.5


def test_a_run_without_costs_is_known_and_counts_nothing(store):
    free = start(store, profile="embedded")
    person = start(store, by_agent=False)
    assert set(read_ledger(store.home)) == {free.submission_key, person.submission_key}
    assert compute_committed_cost(store) == 0


def test_resumes_at_once_do_not_get_the_same_money(store):
    (store.home / "policy.yaml").write_text("agents: {max_cost_usd_per_day: 6}")
    runs = [end(store, start(store, limit_usd=4.0), 0.5) for _ in range(4)]
    outcomes: list[str] = []

    def resume(record):
        try:
            begin_next_attempt(store, record, {}, by_owner=False)
            outcomes.append("resumed")
        except PolicyError:
            outcomes.append("refused")

    threads = [threading.Thread(target=resume, args=(record,)) for record in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("resumed") == 1
    # Each has cost 0.5 before, and the resumed one may use its limit.
    assert compute_committed_cost(store) == 5.5


def test_a_full_disk_promises_nothing(store, monkeypatch):
    """A part of a line would make the next one unreadable."""
    kept = start(store)
    fsync = os.fsync

    def refuse(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError), hold_ledger(store.home) as ledger:
        ledger.promise("test-1", 3.0, by_agent=True)
    settle_run(store, kept)
    monkeypatch.setattr(os, "fsync", fsync)
    start(store)
    assert compute_committed_cost(store) == 10


def test_a_test_counts_with_the_most_that_it_can_cost_until_it_has_ended(store):
    with hold_ledger(store.home) as ledger:
        ledger.promise("test-0123abcd", 3.0, by_agent=True)
        ledger.promise("test-4567abcd", 2.0, by_agent=True)
    assert compute_committed_cost(store) == 5
    with hold_ledger(store.home) as ledger:
        ledger.settle("test-0123abcd", 0.25)
        ledger.withdraw("test-4567abcd")
    assert compute_committed_cost(store) == 0.25
