"""The flow `validate-all-environments`: submit a validation of each environment, or of those that
$LACHESIS_NIGHTLY_ENVIRONMENTS names (separated by spaces), on an optional schedule."""

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
    """The ids of the tests; each is a flow run of its own. Raises LachesisError at the end when one
    could not be submitted.
    """
    service, test_ids, problems = LachesisService(Path(home)), [], []
    chosen = os.environ.get("LACHESIS_NIGHTLY_ENVIRONMENTS", "").split()
    for name in chosen or [
        environment.name for environment in service.list_environments().environments
    ]:
        try:
            launch = LaunchRequest(name)
            # the model of sums tells at least whether it works
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
