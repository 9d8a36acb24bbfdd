"""The flow `validate-environment`: models answer a few items of an environment, and the environment scores the answers."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from prefect import flow

from lachesis.config import RunConfig
from lachesis.errors import LachesisError
from lachesis.inference_tests import InferenceTests, whole_result
from lachesis.runs import now
from tasks.inference import test_model

logging.getLogger("lachesis").setLevel(logging.INFO)  # without a level of its own nothing of it reaches the run's page


@flow(name="validate-environment", retries=0)
def validate(test_id: str, home: str) -> dict[str, Any]:
    """Test each model in turn. A model that fails is told in the result; the flow fails when the test itself cannot be made."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # Ctrl-C in the terminal of the runner must reach the runner alone
    tests = InferenceTests(Path(home))
    with tests.holder(test_id).living() as lock:
        test = tests.load(test_id).model_copy(update={"status": "running"})
        tests.save(test)
        try:
            config = RunConfig.from_yaml(tests.dir(test_id) / "config.yaml")
            models = [test_model(tests, test, config, model, lock) for model in test.request.models]
        except BaseException as error:
            tests.fail(test_id, str(error) if isinstance(error, LachesisError) else f"{type(error).__name__}: {error}")
            raise
        result = whole_result(test, models, tests.dir(test_id))
        tests.save(test.model_copy(update={"status": "completed", "result": result, "ended_at": now()}))
        return result
