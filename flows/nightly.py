"""Define the flow `nightly`, which submits tests of environments on an optional schedule."""

from __future__ import annotations

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
from lachesis.operations.service import LachesisService
from lachesis.prefect_client.forms import list_environment_names

log = logging.getLogger("lachesis.nightly")


@flow(name="nightly", retries=0, validate_parameters=False)
def validate_all(environments: list[str] | None = None) -> State[Any] | None:
    """Test several environments, each as a flow run of the deployment `test`.

    Args:
        environments: The environments. Empty: those in LACHESIS_NIGHTLY_ENVIRONMENTS, or else all.
    """
    try:
        names = _choose_environments(environments)
    except LachesisError as error:
        return end_flow_run(make_refusal(error), force=True)
    service, problems = LachesisService(), []
    for name in names:
        try:
            test_id = _submit_test(service, name)
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


def _submit_test(service: LachesisService, environment: str) -> str:
    """Submit a test and return its id."""
    spec = TestSpec(environment=environment)
    # Without a taught model, the model of sums shows at least whether the environment works.
    if service.describe(spec.to_launch())["problem"]:
        spec = TestSpec(environment=environment, model=TINY_MODEL)
    return service.start_test(spec).test_id
