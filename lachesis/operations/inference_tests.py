"""Check, start and look at inference tests, for all surfaces."""

from lachesis.base.errors import LachesisError
from lachesis.config.launch_spec import TestSpec
from lachesis.environment_catalog.lookup import SCHEMA_TIMEOUT_S
from lachesis.inference_tests.store import (
    EMBEDDED,
    TINKER,
    InferenceRequest,
    InferenceTest,
    InferenceTestStore,
    Stage,
    get_model_name,
)
from lachesis.launch.create_run import create_test, discard_test
from lachesis.launch.resolve import ResolvedTest, resolve_test
from lachesis.prefect_client import background_serve, refresh, submit
from lachesis.prefect_client.resources import PrefectApi
from lachesis.runs.store import RunStore

__all__ = [
    "EMBEDDED",
    "TINKER",
    "InferenceRequest",
    "InferenceTest",
    "InferenceTestStore",
    "ResolvedTest",
    "Stage",
    "get_model_name",
]


def open_tests(store: RunStore) -> InferenceTestStore:
    """Return the tests of the home that these runs are in."""
    return InferenceTestStore(store.home)


def open_checks() -> InferenceTestStore:
    """Return the checks of environments of this home, each kept as a test."""
    return InferenceTestStore(folder="checks")


def check_test(
    store: RunStore, spec: TestSpec, *, schema_timeout_s: float = SCHEMA_TIMEOUT_S
) -> ResolvedTest:
    """Check everything that an inference test needs to start, without making anything.

    Raises:
        LachesisError: What `start_test` would raise.
    """
    key_names = background_serve.read_key_names()
    resolved = resolve_test(spec, store.home, schema_timeout_s, key_names)
    PrefectApi()  # raises when no server is known, before anything is made
    return resolved


def start_test(
    store: RunStore, test: TestSpec | ResolvedTest, *, schema_timeout_s: float = SCHEMA_TIMEOUT_S
) -> InferenceTest:
    """Submit an inference test of an environment.

    Where Prefect's answer is not known, it stays pending, and is sent again by whoever looks at it.

    Args:
        store: The runs of the home.
        test: A spec, or what `check_test` has returned for it.
        schema_timeout_s: How long importing the environment may take.
    """
    if isinstance(test, TestSpec):
        resolved = check_test(store, test, schema_timeout_s=schema_timeout_s)
    else:
        resolved = test
    tests = open_tests(store)
    inference_test = create_test(tests, resolved)
    try:
        submit.submit_test(tests, inference_test)
    except LachesisError:
        discard_test(tests, inference_test)
        raise
    return inference_test


def get_test(store: RunStore, test_id: str) -> InferenceTest:
    """Return the current state of the test."""
    tests = open_tests(store)
    return refresh.refresh_test(tests, tests.load_and_fail_if_dead(test_id))
