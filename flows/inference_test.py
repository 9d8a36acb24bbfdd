"""Define the flow `test`: does an environment work, and can a model learn from it?"""

import os
from typing import Any

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause
from prefect.states import Cancelled, Failed

from flows.flow_run_state import end_flow_run, make_refusal
from lachesis.base.errors import LachesisError
from lachesis.base.json_text import Json
from lachesis.inference_tests.run_test import describe_error, run_test
from lachesis.inference_tests.store import InferenceTestStore
from lachesis.prefect_client.runs_from_prefect import find_or_create_test
from tasks.progress import publish_test_verdict
from tasks.run_as_task import run_as_task

SUSPENDED_ERROR = "it was suspended in Prefect, which ends a test; start it again"


@flow(name="test", retries=0, validate_parameters=False)
def inference_test(
    environment: str = "",
    profile: str = "embedded",
    models: list[str] | None = None,
    model: str | None = None,
    steps: int | None = None,
    group_size: int | None = None,
    prompts: list[str] | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    settings: str | None = None,
    test_id: str | None = None,
    by_agent: bool = False,
) -> State[Any] | None:
    """Test an environment before training: does it work, and can a model learn from it? `TestSpec`
    describes the parameters; `test_id` is reserved for programs.
    """
    parameters = dict(locals())
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # Ctrl-C in the runner's terminal must reach the runner only.
    tests = InferenceTestStore()
    try:
        requested_test = find_or_create_test(tests, parameters, runtime.flow_run.id)
    except LachesisError as error:
        return end_flow_run(make_refusal(error), force=True)
    try:
        test = run_test(tests, requested_test.test_id, run_as_task, _describe_error)
    except Pause:  # A test has no checkpoint to continue from.
        return end_flow_run(Cancelled(message=SUSPENDED_ERROR), force=True)
    publish_test_verdict(tests, test, runtime.flow_run.id)
    result: Json = test.result or {}
    if result["summary"]["environment_working"]:
        return None
    what = "is broken" if result["summary"].get("verdict") else "could not be tested"
    reason = _find_failure_reason(result)
    return end_flow_run(Failed(message=f"{test.request.environment} {what}: {reason}"))


def _describe_error(error: BaseException) -> str:
    if isinstance(error, Pause):
        return SUSPENDED_ERROR
    return describe_error(error)


def _find_failure_reason(result: Json) -> str:
    errors: list[str] = [model["error"] for model in result["models_tested"] if model.get("error")]
    return (errors or ["no model gave a usable group"])[0].split("\n")[0][:300]
