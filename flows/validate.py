"""The flow `validate-environment`: does an environment work, and can a model learn from it?

Stages, each a task: import, config, dataset, model-free check; then per model, all at the same time, inference and scoring.
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

from lachesis.base.errors import LachesisError
from lachesis.config.run_config import RunConfig
from lachesis.env_process.stages import STAGE_NAMES
from lachesis.runs import leftovers
from lachesis.runs.environment_counts import read_counts
from lachesis.runs.store import now_iso
from lachesis.supervision.group import ServiceGroup
from lachesis.supervision.trial import StageChild
from lachesis.validation.forecast import Forecast, make_forecast
from lachesis.validation.tests import InferenceTest, InferenceTestStore, Stage, measure_groups, make_model_result, make_test_result
from lachesis.validation.verdict import InferenceCounts, Verdict, judge_learnability
from tasks.history import earlier_pace
from tasks.inference import Bench, ask_model, build_missing_model, failure_kind, score_model, wandb_run
from tasks.report import publish_validation
from tasks.stages import pass_stage

Json = dict[str, Any]
MOST_MODELS = 10
SUSPENDED = "it was suspended in Prefect, which ends a test; start it again"


@flow(name="validate-environment", retries=0, task_runner=ThreadPoolTaskRunner(max_workers=MOST_MODELS))  # type: ignore[arg-type]
def validate(test_id: str, home: str) -> State[Any] | None:
    """Go through the stages. What is wrong with the environment or a model is told in the result; the flow fails when nothing
    of the environment works."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # Ctrl-C in the terminal of the runner must reach the runner alone
    tests = InferenceTestStore(Path(home))
    with tests.get_run_dir(test_id).hold_alive_lock() as lock:
        record = _Record(tests, tests.load(test_id).model_copy(update={"status": "running", "stages": []}))
        record.save()
        config = RunConfig.from_yaml(tests.dir(test_id) / "config.yaml")
        bench = Bench(tests, record.test, config, lock)
        try:
            build_missing_model(bench)
            result = _validated(record, bench)
        except BaseException as error:
            for group in bench.open:
                group.close()
            _end_strays(tests.dir(test_id))
            if isinstance(error, Pause):  # it has no checkpoint to go on from
                tests.fail(test_id, SUSPENDED)
                return Cancelled(message=SUSPENDED)
            tests.fail(test_id, str(error) if isinstance(error, LachesisError) else f"{type(error).__name__}: {error}")
            raise
    _end_strays(tests.dir(test_id))
    publish_validation(tests, record.test, runtime.flow_run.id)
    if not result["summary"]["environment_working"]:
        what = "is broken" if result["summary"].get("verdict") else "could not be tested"
        return Failed(message=f"{record.test.request.environment} {what}: {_reason(result)}")
    return None


def _end_strays(folder: Path) -> None:
    """Children of the environment that left its process group, and may hold its key."""
    leftovers.terminate_processes([one for processes in leftovers.find_processes(folder).values() for one in processes])


class _Record:
    """The test's file, brought up to date after each stage."""

    def __init__(self, tests: InferenceTestStore, test: InferenceTest) -> None:
        self.tests, self.test = tests, test

    def save(self, **changes: Any) -> None:
        self.test = self.test.model_copy(update=changes)
        self.tests.save(self.test)

    def stage(self, name: str, status: Any, started: float, message: str | None = None) -> None:
        stage = Stage(name=name, status=status, seconds=round(time.monotonic() - started, 2), message=message)
        self.save(stages=[*self.test.stages, stage])


def _validated(record: _Record, bench: Bench) -> Json:
    model_free, failed = _without_model(record, bench)
    if failed is not None:
        models = [_broken(bench, model, failed) for model in record.test.request.models]
    else:
        models = _with_models(record, bench, model_free)
    result = make_test_result(record.test, models, bench.tests.dir(record.test.test_id))
    record.save(status="completed", result=result, ended_at=now_iso())
    return result


def _without_model(record: _Record, bench: Bench) -> tuple[Json, str | None]:
    """What the check without a model found, and the name and reason of the stage that failed, if one did."""
    folder = bench.tests.dir(record.test.test_id)
    line: Json = {}
    with ServiceGroup(inherited_fds=(bench.lock,)) as group:
        bench.open.append(group)
        test = record.test
        child = StageChild(group, test.request.environment_file, test.class_name, bench.config, folder)
        for name in STAGE_NAMES:
            started = time.monotonic()
            try:
                line = pass_stage(child, name)
            except LachesisError as error:
                record.stage(name, "failed", started, str(error))
                return {}, f"{name}: {error}"
            found = line.get("detail") or {}
            if test.planned is not None and (answers := found.get("evaluation_answers")) is not None:
                record.save(planned=test.planned.model_copy(update={"evaluation_answers": answers}))
            offered = found.get("offered", True)
            faults = found.get("faults") or []
            status = "failed" if faults else "passed" if offered else "not offered"
            record.stage(name, status, started, "; ".join(faults) or None)
    return line.get("detail") or {}, None


def _with_models(record: _Record, bench: Bench, model_free: Json) -> list[Json]:
    """Every model's entry; they are asked at the same time."""
    models, started = record.test.request.models, time.monotonic()
    runs = [wandb_run(record.test) for _ in models]
    futures = ask_model.map(unmapped(bench), models, runs)
    entries = []
    for model, run, future in zip(models, runs, futures, strict=True):
        error = _error_of(future)
        record.stage(f"inference {model}", "failed" if error else "passed", started, error)
        entries.append(_entry(record, bench, model, run, error, model_free))
    return entries


def _error_of(future: PrefectFuture[Any]) -> str | None:
    answer = future.result(raise_on_failure=False)
    return str(answer) or type(answer).__name__ if isinstance(answer, BaseException) else None


def _entry(record: _Record, bench: Bench, model: str, run: str, error: str | None, model_free: Json) -> Json:
    """The contract's entry of one model, judged."""
    request, started = record.test.request, time.monotonic()
    output, counted = bench.tests.get_output_file(record.test, model), read_counts(bench.tests.get_counters_file(record.test, model))
    verdict: Verdict | None = None
    if request.prompts is None:
        if error is None:
            try:
                verdict = score_model(bench, model, model_free)
                record.stage(f"scoring {model}", "passed", started)
            except LachesisError as problem:
                error = str(problem)
                record.stage(f"scoring {model}", "failed", started, error)
        if verdict is None and failure_kind(bench.tests.get_counters_file(record.test, model)) not in ("transport", "endpoint"):
            said = "; ".join((counted or {}).get("errors") or {})  # more than the end of its process says
            verdict = judge_learnability(InferenceCounts(), error=said or error)  # what the endpoint did wrong says nothing of the environment
    made = _forecast(record.test, bench, output, counted) if verdict else None
    result = make_model_result(output, model, run, error=error, prompts=bool(request.prompts), verdict=verdict, forecast=made)
    if not error and result["steps_tested"] + (counted or {}).get("empty", 0) < request.num_steps:
        few = f"{result['steps_tested']} groups came of those asked for"
        result["error"] = "; ".join([few, *(counted or {}).get("errors", {})]) + f", see {result['log_file']}"
    return result


def _forecast(test: InferenceTest, bench: Bench, output: Path, counted: Json | None) -> Forecast | None:
    if test.planned is None:
        return None
    pace = earlier_pace(bench.tests.home, test.fingerprint, test.planned)
    return make_forecast(measure_groups(output, counted), test.planned, bench.config.tinker.prices, step_seconds=pace)


def _broken(bench: Bench, model: str, reason: str) -> Json:
    verdict = judge_learnability(InferenceCounts(), error=reason) if bench.test.request.prompts is None else None
    output = bench.tests.get_output_file(bench.test, model)
    prompts = bool(bench.test.request.prompts)
    return make_model_result(output, model, wandb_run(bench.test), error=reason, prompts=prompts, verdict=verdict)


def _reason(result: Json) -> str:
    errors: list[str] = [model["error"] for model in result["models_tested"] if model.get("error")]
    return (errors or ["no model gave a usable group"])[0].split("\n")[0][:300]
