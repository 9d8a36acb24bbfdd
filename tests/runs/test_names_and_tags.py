"""Runs by a beginning of their id, by their name, and the newest one."""

import pytest

from lachesis.base.errors import UnknownRunError
from lachesis.runs.names_and_tags import resolve_checkpoint_name, resolve_run_id
from lachesis.runs.store import RunStore
from tests.harness.home import make_record

RUN_IDS = ("0123abcd", "0199ffff", "ab000000", "cd000000")
# A name may look like the beginning of an id.
NAMES = ("careful", "ab", "twice", "twice")


@pytest.fixture
def store():
    store = RunStore()
    for index, run_id in enumerate(RUN_IDS):
        created_at, name = f"2026-01-0{4 - index}T00:00:00+00:00", NAMES[index]
        store.create(make_record(run_id=run_id, created_at=created_at, name=name))
    return store


@pytest.mark.parametrize(
    ("text", "run_id"),
    [
        ("0123abcd", "0123abcd"),
        ("012", "0123abcd"),
        ("a", "ab000000"),
        ("@last", "0123abcd"),
        ("ff", "ff"),
        ("unknown run", "unknown run"),
        ("careful", "0123abcd"),
        ("twice", "ab000000"),
        ("ab", "ab000000"),
    ],
)
def test_a_run_is_found(store, text, run_id):
    assert resolve_run_id(store, text) == run_id


def test_what_is_ambiguous_is_refused_with_the_choices(store):
    with pytest.raises(
        UnknownRunError, match=r"2 runs begin with '01': 0123abcd \(careful, pending\)"
    ):
        resolve_run_id(store, "01")


def test_the_last_of_no_runs():
    with pytest.raises(UnknownRunError, match="there is no run yet"):
        resolve_run_id(RunStore(), "@last")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("012@7", "0123abcd@7"),
        ("@last@best", "0123abcd@best"),
        ("@last", "0123abcd"),
        ("ab", "ab000000"),
        ("careful@best", "0123abcd@best"),
        ("last", "last"),
        ("best@@", "best@@"),
    ],
)
def test_a_checkpoint_is_found(store, text, name):
    assert resolve_checkpoint_name(store, text) == name
