"""Define the flow `validate-all-environments`, which submits validations on an optional schedule.

It validates each environment, or those in $LACHESIS_NIGHTLY_ENVIRONMENTS (separated by spaces).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from prefect import flow

from lachesis.base.errors import LachesisError
from lachesis.orchestration.launch_inputs import TINY_MODEL
from lachesis.service import LachesisService, LaunchRequest
from lachesis.validation.inference_tests import TestOptions

log = logging.getLogger("lachesis.nightly")


@flow(name="validate-all-environments", retries=0)
def validate_all(home: str) -> list[str]:
    """Submit a test of each environment and return the ids; each is a flow run of its own.

    Raises:
        LachesisError: A test could not be submitted; raised after the others were.
    """
    service, test_ids, problems = LachesisService(Path(home)), [], []
    chosen = os.environ.get("LACHESIS_NIGHTLY_ENVIRONMENTS", "").split()
    for name in chosen or [
        environment.name for environment in service.list_environments().environments
    ]:
        try:
            launch = LaunchRequest(name)
            # Without a taught model, the model of sums shows at least whether the environment
            # works.
            if service.describe(launch)["problem"]:
                launch = LaunchRequest(name, model=TINY_MODEL)
            test = service.start_test(launch, TestOptions())
            test_ids.append(test.test_id)
            log.info("%s: test %s", name, test.test_id)
        except LachesisError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise LachesisError("; ".join(problems))
    return test_ids
