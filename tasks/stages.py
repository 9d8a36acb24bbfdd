"""Run the stages of a validation without a model as tasks; one child runs all of them."""

from __future__ import annotations

import json
import logging

from prefect import task
from prefect.cache_policies import NO_CACHE

from lachesis.base.json_text import Json
from lachesis.environment_check.stages import StageChild

log = logging.getLogger("lachesis.validation")


@task(task_run_name="{stage}", cache_policy=NO_CACHE)
def run_stage(child: StageChild, stage: str) -> Json:
    """Return the result of a stage.

    Raises:
        StageError: The stage failed.
    """
    line = child.wait_for_stage(stage)
    log.info("%s: %s", stage, json.dumps(line.get("detail")))
    return line
