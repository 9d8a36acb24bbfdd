"""Run the inference test of an agent's draft, waiting for its result as long as a call may take."""

import time
from collections.abc import Mapping
from typing import Any

from lachesis.agent_tools.answers import drop_empty
from lachesis.agent_tools.session import (
    MAX_WAIT_S,
    PROGRESS_INTERVAL_S,
    SCHEMA_TIMEOUT_S,
    AgentSession,
    ReportProgress,
    RequestedTest,
)
from lachesis.base.errors import StorageError, UnknownTestError
from lachesis.base.json_text import Json
from lachesis.config.launch_spec import TestSpec, read_spec
from lachesis.operations.inference_tests import InferenceTest, get_test, open_tests, start_test
from lachesis.reporting.inference_test_view import InferenceTestView


def run_inference_test(
    session: AgentSession,
    options: Mapping[str, Any],
    report_progress: ReportProgress,
    deadline: float | None = None,
) -> Json:
    """Test the draft's environment, and return a report when it has ended or the time is over.

    The same call again continues to wait for the same test. `options` are fields of `TestSpec`, and
    `deadline` is as in `wait_for_test`.
    """
    with session.session_file.hold("test"):
        state = session.session_file.read()
        draft = session.require_draft()
        draft_values = {
            name: value
            for name, value in draft.model_dump().items()
            if name in TestSpec.model_fields and name != "steps"
        }
        spec = read_spec(TestSpec, {**draft_values, "settings": draft.list_edits(), **options})
        if (
            state.test is None
            or state.test.request != spec
            or _has_test_ended(session, state.test.test_id)
        ):
            test = start_test(session.store, spec, schema_timeout_s=SCHEMA_TIMEOUT_S)
            requested = RequestedTest(request=spec, test_id=test.test_id)
            with session.session_file.change() as state:
                state.test = requested
        else:
            requested = state.test
    return wait_for_test(session, requested.test_id, report_progress, deadline)


def _has_test_ended(session: AgentSession, test_id: str) -> bool:
    try:
        return get_test(session.store, test_id).has_ended
    except UnknownTestError:
        return True


def wait_for_test(
    session: AgentSession,
    test_id: str,
    report_progress: ReportProgress,
    deadline: float | None = None,
) -> Json:
    """Return the result of a test, after waiting for it.

    Args:
        session: The session that asks.
        test_id: The test.
        report_progress: Called about once a second while waiting.
        deadline: Monotonic time until which to wait; by default `MAX_WAIT_S` seconds from now.
    """
    started_at, reported_s = time.monotonic(), 0.0
    deadline = deadline or started_at + MAX_WAIT_S
    get_test(session.store, test_id)  # a test whose process died is reported at once
    while (
        not (test := open_tests(session.store).load_and_fail_if_dead(test_id)).has_ended
        and (now := time.monotonic()) < deadline
    ):
        if now - started_at - reported_s > PROGRESS_INTERVAL_S:
            reported_s, (done, total) = now - started_at, _count_groups(session, test)
            report_progress(
                round(reported_s, 1),
                round(deadline - started_at, 1),
                f"{test.status}: {done} of {total} groups",
            )
        time.sleep(0.25)
    return _report_test(session, get_test(session.store, test_id))


def _count_groups(session: AgentSession, test: InferenceTest) -> tuple[int, int]:
    num_groups = test.request.spec.num_groups * len(test.request.models)
    return open_tests(session.store).count_finished_groups(test), num_groups


def _report_test(session: AgentSession, test: InferenceTest) -> Json:
    """Return the result of a test, or its progress.

    Raises:
        StorageError: The result is damaged.
    """
    view = InferenceTestView(test, open_tests(session.store))
    try:
        next_step = view.describe_next_step("rl_start_training()", "rl_test_inference()")
        view.models  # noqa: B018  reads all of the result
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        file = open_tests(session.store).dir(test.test_id) / "test.json"
        raise StorageError(f"{file} is damaged ({type(error).__name__}); test again") from error
    done, total = _count_groups(session, test)
    repeat_call = f'rl_test_inference(test_id="{test.test_id}")'
    message = None
    if not test.has_ended:
        message = f"the test is still running; {repeat_call} waits for it and returns its result"
        next_step = repeat_call
    return {
        **(test.result or {}),
        "test_id": test.test_id,
        "status": test.status,
        "groups_done": done,
        "groups_total": total,
        "stages": [stage.model_dump(mode="json") for stage in test.stages],
        "next_steps": [next_step],
        "environment": test.request.environment,
        "environment_file": test.request.environment_file,
        **drop_empty(message=message, error=test.error),
    }
