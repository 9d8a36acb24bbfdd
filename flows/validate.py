"""Define the flow `test`: does an environment work, and can a model learn from it?

Its stages, each a task, are import, config, dataset and model-free check; then for all models
concurrently inference and scoring.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from prefect import flow, runtime, unmapped
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause
from prefect.futures import PrefectFuture
from prefect.states import Cancelled, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from flows.flow_run_state import end_flow_run, make_refusal
from lachesis.base.errors import LachesisError
from lachesis.base.json_text import Json
from lachesis.base.timestamps import now_iso
from lachesis.config.prices import find_storage_price
from lachesis.config.run_config import RunConfig
from lachesis.environment_check.stages import StageChild
from lachesis.environment_process.model_free_check import STAGE_NAMES
from lachesis.inference_tests.forecast import Forecast, make_forecast
from lachesis.inference_tests.planned_run import find_earlier_step_time
from lachesis.inference_tests.results import (
    compute_test_cost,
    make_model_result,
    make_test_result,
    measure_groups,
)
from lachesis.inference_tests.store import InferenceTest, InferenceTestStore, Stage, get_model_name
from lachesis.inference_tests.verdict import InferenceCounts, Verdict, judge_learnability
from lachesis.models.find_model import compute_template_digest
from lachesis.prefect_client.runs_from_prefect import find_or_create_test
from lachesis.runs.environment_counters import read_counts
from lachesis.spending.ledger import settle
from lachesis.supervision import process_marks
from lachesis.supervision.running_services import ServiceGroup
from tasks.inference import (
    InferenceTestContext,
    build_missing_model,
    make_wandb_run_name,
    read_failure_kind,
    run_model_inference,
    score_model,
)
from tasks.progress import publish_validation
from tasks.stages import run_stage

MAX_MODELS = 10
SUSPENDED_ERROR = "it was suspended in Prefect, which ends a test; start it again"


@flow(
    name="test",
    retries=0,
    task_runner=ThreadPoolTaskRunner(max_workers=MAX_MODELS),  # type: ignore[arg-type]
    validate_parameters=False,
)
def validate(
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
        test = find_or_create_test(tests, parameters, runtime.flow_run.id)
    except LachesisError as error:
        return end_flow_run(make_refusal(error), force=True)
    return _run_test(tests, test.test_id)


def _run_test(tests: InferenceTestStore, test_id: str) -> State[Any] | None:
    """Run the stages; the result says what is wrong, and the flow fails if nothing works."""
    with tests.get_run_dir(test_id).hold_alive_lock() as lock_fd:
        test = tests.load(test_id).model_copy(update={"status": "running", "stages": []})
        record = _TestRecorder(tests, test)
        record.save()
        config = RunConfig.from_yaml(tests.dir(test_id) / "config.yaml")
        context = InferenceTestContext(tests, record.test, config, lock_fd)
        try:
            build_missing_model(context)
            result = _run_validation(record, context)
        except BaseException as error:
            context.close_groups()
            _end_stray_processes(tests.dir(test_id))
            if isinstance(error, Pause):  # A test has no checkpoint to continue from.
                tests.fail(test_id, SUSPENDED_ERROR)
                return end_flow_run(Cancelled(message=SUSPENDED_ERROR), force=True)
            tests.fail(test_id, _describe_error(error))
            raise
    _end_stray_processes(tests.dir(test_id))
    if record.test.max_cost_usd is not None:
        settle(tests.home, record.test.submission_key, record.test.cost_usd)
    publish_validation(tests, record.test, runtime.flow_run.id)
    if result["summary"]["environment_working"]:
        return None
    return end_flow_run(Failed(message=_describe_failure(record.test.request.environment, result)))


def _describe_failure(environment: str, result: Json) -> str:
    what = "is broken" if result["summary"].get("verdict") else "could not be tested"
    return f"{environment} {what}: {_find_failure_reason(result)}"


def _describe_error(error: BaseException) -> str:
    if isinstance(error, LachesisError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _end_stray_processes(folder: Path) -> None:
    """End children of the environment that have left its process group and may hold its key."""
    process_marks.terminate_processes(
        [
            process
            for processes in process_marks.find_processes(folder).values()
            for process in processes
        ]
    )


class _TestRecorder:
    """Update the test's record after each stage."""

    def __init__(self, tests: InferenceTestStore, test: InferenceTest) -> None:
        self.tests, self.test = tests, test

    def save(self, **changes: object) -> None:
        self.test = self.test.model_copy(update=changes)
        self.tests.save(self.test)

    def add_stage(
        self,
        name: str,
        status: object,
        started: float,
        message: str | None = None,
        ended: float | None = None,
    ) -> None:
        """Add a stage that began at `started` and ended at `ended`, by default now."""
        seconds = (time.monotonic() if ended is None else ended) - started
        stage = Stage(name=name, status=status, seconds=round(seconds, 2), message=message)
        self.save(stages=[*self.test.stages, stage])


def _run_validation(record: _TestRecorder, context: InferenceTestContext) -> Json:
    model_free, failure = _run_model_free_stages(record, context)
    if failure is not None:
        models = [
            _make_broken_entry(context, model, failure) for model in record.test.request.models
        ]
    else:
        models = _test_models(record, context, model_free)
    result = make_test_result(record.test, models, context.tests.dir(record.test.test_id))
    # The models were loaded by now, so their templates are on this machine.
    templates = {
        model: digest
        for model in record.test.request.models
        if (digest := compute_template_digest(get_model_name(model)))
    }
    record.save(status="completed", result=result, chat_templates=templates, ended_at=now_iso())
    return result


def _run_model_free_stages(
    record: _TestRecorder, context: InferenceTestContext
) -> tuple[Json, str | None]:
    """Return the result of the check without a model, and the name and reason of a failed stage."""
    folder = context.tests.dir(record.test.test_id)
    line: Json = {}
    with ServiceGroup(inherited_fds=(context.lock_fd,)) as group:
        context.open_groups.append(group)
        test = record.test
        child = StageChild(
            group, test.request.environment_file, test.class_name, context.config, folder
        )
        for name in STAGE_NAMES:
            started = time.monotonic()
            try:
                line = run_stage(child, name)
            except LachesisError as error:
                record.add_stage(name, "failed", started, str(error))
                return {}, f"{name}: {error}"
            detail = line.get("detail") or {}
            if (
                test.planned is not None
                and (answers := detail.get("evaluation_answers")) is not None
            ):
                record.save(planned=test.planned.model_copy(update={"evaluation_answers": answers}))
            offered = detail.get("offered", True)
            faults = detail.get("faults") or []
            status = "failed" if faults else "passed" if offered else "not offered"
            record.add_stage(name, status, started, "; ".join(faults) or None)
    return line.get("detail") or {}, None


def _test_models(
    record: _TestRecorder, context: InferenceTestContext, model_free: Json
) -> list[Json]:
    """Return the entries of all models, which are tested concurrently."""
    models, submitted = record.test.request.models, time.monotonic()
    wandb_run_names = [make_wandb_run_name(record.test) for _ in models]
    futures = run_model_inference.map(unmapped(context), models, wandb_run_names)
    entries = []
    for model, wandb_run_name, future in zip(models, wandb_run_names, futures, strict=True):
        error = _find_error(future)
        # The models are awaited one after another, but each has its own times.
        started, ended = context.model_times.get(model, (submitted, None))
        status = "failed" if error else "passed"
        record.add_stage(f"inference {model}", status, started, error, ended)
        entries.append(_make_model_entry(record, context, model, wandb_run_name, error, model_free))
    return entries


def _find_error(future: PrefectFuture[Any]) -> str | None:
    result = future.result(raise_on_failure=False)
    if isinstance(result, BaseException):
        return str(result) or type(result).__name__
    return None


def _make_model_entry(
    record: _TestRecorder,
    context: InferenceTestContext,
    model: str,
    wandb_run_name: str,
    error: str | None,
    model_free: Json,
) -> Json:
    """Return the judged entry of one model."""
    request = record.test.request
    output = context.tests.get_output_file(record.test, model)
    counts = read_counts(context.tests.get_counters_file(record.test, model))
    verdict = None
    if request.spec.prompts is None:
        verdict, error = _judge_model(record, context, model, error, model_free)
    forecast = _make_forecast(record.test, context, output, counts) if verdict else None
    result = make_model_result(
        output,
        model,
        wandb_run_name,
        error=error,
        prompts=bool(request.spec.prompts),
        verdict=verdict,
        forecast=forecast,
        cost_usd=compute_test_cost(model, counts, context.tests.home),
    )
    if (
        not error
        and result["steps_tested"] + (counts or {}).get("empty_groups", 0) < request.spec.num_groups
    ):
        shortfall = f"only {result['steps_tested']} of the requested groups were made"
        reasons = "; ".join([shortfall, *(counts or {}).get("errors", {})])
        result["error"] = f"{reasons}, see {result['log_file']}"
    return result


def _judge_model(
    record: _TestRecorder,
    context: InferenceTestContext,
    model: str,
    error: str | None,
    model_free: Json,
) -> tuple[Verdict | None, str | None]:
    """Return the verdict about one model, if there can be one, and the error of its test."""
    started = time.monotonic()
    if error is None:
        try:
            verdict = score_model(context, model, model_free)
        except LachesisError as problem:
            error = str(problem)
            record.add_stage(f"scoring {model}", "failed", started, error)
        else:
            record.add_stage(f"scoring {model}", "passed", started)
            return verdict, None
    counters_file = context.tests.get_counters_file(record.test, model)
    # A fault of the endpoint says nothing about the environment.
    if read_failure_kind(counters_file) in ("transport", "endpoint"):
        return None, error
    # The counts say more than the end of the process.
    errors = "; ".join((read_counts(counters_file) or {}).get("errors") or {})
    return judge_learnability(InferenceCounts(), error=errors or error), error


def _make_forecast(
    test: InferenceTest, context: InferenceTestContext, output: Path, counts: Json | None
) -> Forecast | None:
    if test.planned is None:
        return None
    pace = find_earlier_step_time(context.tests.home, test.fingerprint, test.planned)
    return make_forecast(
        measure_groups(output, counts),
        test.planned,
        context.config.prices,
        step_seconds=pace,
        storage_price=find_storage_price(context.tests.home),
    )


def _make_broken_entry(context: InferenceTestContext, model: str, reason: str) -> Json:
    if context.test.request.spec.prompts is None:
        verdict = judge_learnability(InferenceCounts(), error=reason)
    else:
        verdict = None
    output = context.tests.get_output_file(context.test, model)
    prompts = bool(context.test.request.spec.prompts)
    return make_model_result(
        output,
        model,
        make_wandb_run_name(context.test),
        error=reason,
        prompts=prompts,
        verdict=verdict,
    )


def _find_failure_reason(result: Json) -> str:
    errors: list[str] = [model["error"] for model in result["models_tested"] if model.get("error")]
    return (errors or ["no model gave a usable group"])[0].split("\n")[0][:300]
