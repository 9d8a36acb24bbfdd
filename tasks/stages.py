"""The stages of a validation that need no model, each a task that fails by its name. One child goes
through them.
"""

from __future__ import annotations

import json
import logging

from prefect import task
from prefect.cache_policies import NO_CACHE

from lachesis.base.json_text import Json
from lachesis.supervision.trial import StageChild

log = logging.getLogger("lachesis.validation")


@task(task_run_name="{stage}", cache_policy=NO_CACHE)
def run_stage(child: StageChild, stage: str) -> Json:
    """What the stage found. Raises StageError."""
    line = child.wait_for_stage(stage)
    log.info("%s: %s", stage, json.dumps(line.get("detail")))
    return line
