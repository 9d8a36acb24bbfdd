"""Define the flow `nightly`, which submits tests of environments on an optional schedule."""

import logging
import os
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Failed

from flows.flow_run_state import end_flow_run, make_refusal
from lachesis.base.errors import ArgumentsError, LachesisError
from lachesis.config.launch_spec import TestSpec
from lachesis.launch.choose_model import TINY_MODEL
from lachesis.operations.inference_tests import start_test
from lachesis.operations.launches import describe_launch
from lachesis.prefect_client.forms import list_environment_names
from lachesis.runs.store import RunStore

log = logging.getLogger("lachesis.nightly")


@flow(name="nightly", retries=0, validate_parameters=False)
def nightly(environments: list[str] | None = None) -> State[Any] | None:
    """Test several environments, each as a flow run of the deployment `test`.

    Args:
        environments: The environments. Empty: those in LACHESIS_NIGHTLY_ENVIRONMENTS, or else all.
    """
    try:
        names = _choose_environments(environments)
    except LachesisError as error:
        return end_flow_run(make_refusal(error), force=True)
    store, problems = RunStore(), []
    for name in names:
        try:
            test_id = _submit_test(store, name)
            log.info("%s: test %s", name, test_id)
        except LachesisError as error:
            problems.append(f"{name}: {error}")
    if problems:
        return end_flow_run(Failed(message="; ".join(problems)))
    return None


def _choose_environments(environments: list[str] | None) -> list[str]:
    """Return the names of the environments to test.

    Raises:
        ArgumentsError: The parameter is not a list of names.
    """
    chosen: object = environments or os.environ.get("LACHESIS_NIGHTLY_ENVIRONMENTS", "").split()
    if not isinstance(chosen, list) or not all(isinstance(name, str) for name in chosen):
        raise ArgumentsError(
            f"the parameter environments is {environments!r}; allowed: a list of names, of "
            f"{', '.join(list_environment_names())}"
        )
    return chosen or list_environment_names()


def _submit_test(store: RunStore, environment: str) -> str:
    """Submit a test and return its id."""
    spec = TestSpec(environment=environment)
    # Without a taught model, the model of sums shows at least whether the environment works.
    if describe_launch(store, spec.to_launch())["problem"]:
        spec = TestSpec(environment=environment, model=TINY_MODEL)
    return start_test(store, spec).test_id
