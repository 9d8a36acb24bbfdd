"""The stages of a validation that need no model, each a task that fails by its name. One child goes through them."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from lachesis.config import RunConfig
from lachesis.errors import LachesisError, StageError
from lachesis.inference_tests import InferenceTest
from lachesis.runs import write_private
from lachesis.stages import NAMES
from lachesis.supervision.group import ServiceGroup
from lachesis.supervision.plan import make_check

log = logging.getLogger("lachesis.validation")
TIMEOUT_S = {"import": 120.0, "config": 60.0, "dataset": 300.0, "model-free check": 120.0}
POLL_S = 0.05
Json = dict[str, Any]


class Check:
    """The child. Its lines come in the order of the stages."""

    def __init__(self, group: ServiceGroup, test: InferenceTest, config: RunConfig, folder: Path) -> None:
        self.group, self.out = group, folder / "stages.jsonl"
        self.out.unlink(missing_ok=True)
        self.spec, files = make_check(test.request.environment_file, test.class_name, config, folder, self.out)
        for path, text in files.items():
            write_private(path, text)
        group.start(self.spec)

    def result(self, stage: str, timeout_s: float) -> Json:
        """The stage's line once it is there. Raises StageError when it failed, hangs, or took the child with it."""
        until = time.monotonic() + timeout_s
        while (line := self._line(stage)) is None:
            if not self.group.running(self.spec.name) and self._line(stage) is None:
                try:
                    self.group.require(self.spec.name)
                except LachesisError as error:
                    raise StageError(str(error), stage=stage) from error
            if time.monotonic() > until:
                raise StageError(f"not done after {timeout_s:.0f} s, see {self.spec.log}", stage=stage)
            time.sleep(POLL_S)
        if not line["ok"]:
            raise StageError(f"{line['error']} (see {self.spec.log})", stage=stage)
        return line

    def _line(self, stage: str) -> Json | None:
        index = NAMES.index(stage)
        try:
            lines = self.out.read_text(encoding="utf-8").split("\n")[:-1]  # what has no end of line is still being written
        except FileNotFoundError:
            return None
        return json.loads(lines[index]) if len(lines) > index else None


@task(task_run_name="{stage}", cache_policy=NO_CACHE)
def pass_stage(check: Check, stage: str) -> Json:
    """What the stage found. Raises StageError."""
    line = check.result(stage, TIMEOUT_S[stage])
    log.info("%s: %s", stage, json.dumps(line.get("detail")))
    return line
