"""While modules are imported no garbage is collected, and afterwards it is."""

import contextlib
import gc

import pytest

from lachesis.models.transformers_import import pause_garbage_collection


@pytest.fixture(autouse=True)
def keep_the_collector_as_it_is():
    yield
    gc.enable()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(is_enabled):
    (gc.enable if is_enabled else gc.disable)()
    with contextlib.suppress(ImportError), pause_garbage_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() == is_enabled


def test_what_was_made_is_never_looked_at_again():
    before = gc.get_freeze_count()
    with pause_garbage_collection():
        kept = [[] for _ in range(1000)]
    assert gc.get_freeze_count() >= before + len(kept)
