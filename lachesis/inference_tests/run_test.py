"""Run an inference test: does an environment work, and can a model learn from it?

Its stages are import, config, dataset and model-free check; then for all models concurrently
inference and scoring. The caller may show each as a step of its own.
"""

import contextvars
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lachesis.base.errors import LachesisError
from lachesis.base.json_text import Json
from lachesis.base.timestamps import now_iso
from lachesis.config.prices import find_storage_price
from lachesis.config.run_config import RunConfig
from lachesis.environment_check.stages import StageChild, StageResult, run_stages
from lachesis.inference_tests.answer_items import (
    TestContext,
    answer_items,
    make_wandb_run_name,
    read_failure_kind,
    score_answers,
)
from lachesis.inference_tests.forecast import Forecast, GroupSums, make_forecast, sum_groups
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
from lachesis.runs.environment_counters import read_counts
from lachesis.spending.ledger import settle
from lachesis.supervision import process_marks
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.serve_model import build_tiny_model, is_missing_tiny_model

log = logging.getLogger("lachesis.validation")
MAX_MODELS = 10


class ShowStep(Protocol):
    """Show a step of this name while its work is done; return and raise what the work does."""

    def __call__(self, name: str, work: Callable[[], Any], /) -> Any: ...


def describe_error(error: BaseException) -> str:
    """Return why a test has failed, for its record."""
    if isinstance(error, LachesisError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def run_test(
    tests: InferenceTestStore,
    test_id: str,
    show_step: ShowStep = lambda name, work: work(),
    describe: Callable[[BaseException], str] = describe_error,
) -> InferenceTest:
    """Run the stages of a test, and return the test with its result.

    Args:
        tests: The tests of a home.
        test_id: The test.
        show_step: Shows each stage.
        describe: Says why the test ends if a stage is interrupted.
    """
    with tests.get_run_dir(test_id).hold_alive_lock() as lock_fd:
        test = tests.load(test_id).model_copy(update={"status": "running", "stages": []})
        config = RunConfig.from_yaml(tests.dir(test_id) / "config.yaml")
        run = _TestRun(TestContext(tests, test, config, lock_fd), show_step)
        run.save()
        try:
            build_missing_model(run.context, show_step)
            run.finish()
        except BaseException as error:
            run.context.close_groups()
            tests.fail(test_id, describe(error))
            raise
        finally:
            _end_stray_processes(run.context)
    if run.test.max_cost_usd is not None:
        settle(tests.home, run.test.submission_key, run.test.cost_usd)
    return run.test


def build_missing_model(context: TestContext, show_step: ShowStep) -> None:
    """Build the tiny model if it is needed and does not exist; tests at an endpoint need its
    tokenizer.

    Raises:
        LachesisError: It cannot be built, which says nothing about the environment.
    """
    names = [get_model_name(model) for model in context.test.request.models]
    for name in (context.config.openai.model_name, *names):
        if is_missing_tiny_model(name, context.tests.home):
            show_step(
                "build tiny model", lambda: build_tiny_model(context.tests.home, context.folder)
            )


def _end_stray_processes(context: TestContext) -> None:
    """End children of the environment that have left its process group and may hold its key."""
    groups = process_marks.find_processes(context.folder).values()
    process_marks.terminate_processes([process for group in groups for process in group])


@dataclass(frozen=True)
class _Answers:
    """Hold how the answering of one model ended."""

    model: str
    wandb_run: str
    error: str | None
    seconds: float


class _TestRun:
    """Run the stages of one test, and keep its record up to date after each."""

    def __init__(self, context: TestContext, show_step: ShowStep) -> None:
        self.context, self.show_step = context, show_step
        self.test = context.test

    def save(self, **changes: object) -> None:
        """Change the record."""
        self.test = self.test.model_copy(update=changes)
        self.context.tests.save(self.test)

    def add_stage(self, stage: Stage | StageResult) -> None:
        """Add a stage that has ended."""
        stage = Stage(
            name=stage.name,
            status=stage.status,
            seconds=round(stage.seconds, 2),
            message=stage.message or None,
        )
        self.save(stages=[*self.test.stages, stage])

    def finish(self) -> None:
        """Run all stages, and write down the result."""
        model_free, failure = self._run_model_free_stages()
        if failure is None:
            results = self._test_models(model_free)
        else:
            results = [self._make_broken_result(model, failure) for model in self._models]
        # The models were loaded by now, so their templates are on this machine.
        templates = {
            model: digest
            for model in self._models
            if (digest := compute_template_digest(get_model_name(model)))
        }
        self.save(
            status="completed",
            result=make_test_result(self.test, results, self.context.folder),
            chat_templates=templates,
            ended_at=now_iso(),
        )

    @property
    def _models(self) -> list[str]:
        return self.test.request.models

    @property
    def _has_prompts(self) -> bool:
        return bool(self.test.request.spec.prompts)

    def _run_model_free_stages(self) -> tuple[Json, str | None]:
        """Return the check without a model, and the name and reason of a failed stage."""
        context, request = self.context, self.test.request
        detail: Json = {}
        with ServiceGroup(inherited_fds=(context.lock_fd,)) as group:
            context.open_groups.append(group)
            child = StageChild(
                group,
                request.environment_file,
                self.test.class_name,
                context.config,
                context.folder,
            )
            for stage in run_stages(child, self.show_step):
                self.add_stage(stage)
                if stage.is_last:
                    return {}, f"{stage.name}: {stage.message}"
                detail = stage.detail
                log.info("%s: %s", stage.name, json.dumps(detail))
                answers = detail.get("evaluation_answers")
                if self.test.planned is not None and answers is not None:
                    changes = {"evaluation_answers": answers}
                    self.save(planned=self.test.planned.model_copy(update=changes))
        return detail, None

    def _test_models(self, model_free: Json) -> list[Json]:
        """Return the results of all models, which answer concurrently."""
        executor = ThreadPoolExecutor(MAX_MODELS)
        try:
            # What the caller shows may depend on its context, which a thread does not inherit.
            futures = [
                executor.submit(contextvars.copy_context().run, self._answer, model)
                for model in self._models
            ]
            results = []
            for future in futures:
                answers = future.result()
                self.add_stage(
                    Stage(
                        name=f"inference {answers.model}",
                        status="failed" if answers.error else "passed",
                        seconds=answers.seconds,
                        message=answers.error,
                    )
                )
                results.append(self._judge_answers(answers, model_free))
            return results
        except BaseException:
            self.context.close_groups()
            raise
        finally:
            executor.shutdown(cancel_futures=True)

    def _answer(self, model: str) -> _Answers:
        """Let one model answer, and return how long it took and why it failed."""
        wandb_run, started, error = make_wandb_run_name(self.test), time.monotonic(), None
        try:
            self.show_step(
                f"inference {model}", lambda: answer_items(self.context, model, wandb_run)
            )
        except Exception as problem:
            error = str(problem) or type(problem).__name__
        return _Answers(model, wandb_run, error, time.monotonic() - started)

    def _judge_answers(self, answers: _Answers, model_free: Json) -> Json:
        """Return the judged result of one model."""
        tests, spec, model = self.context.tests, self.test.request.spec, answers.model
        output, error, verdict = tests.get_output_file(self.test, model), answers.error, None
        counts = read_counts(tests.get_counters_file(self.test, model))
        if not self._has_prompts:
            verdict, error = self._judge_model(model, error, model_free)
        usage = sum_groups(measure_groups(output, counts)) if verdict else None
        result = make_model_result(
            output,
            model,
            answers.wandb_run,
            error=error,
            prompts=self._has_prompts,
            verdict=verdict,
            usage=usage,
            forecast=self._make_forecast(usage) if usage else None,
            cost_usd=compute_test_cost(model, counts, tests.home),
        )
        num_groups = result["steps_tested"] + (counts or {}).get("empty_groups", 0)
        if not error and num_groups < spec.num_groups:
            shortfall = f"only {result['steps_tested']} of the requested groups were made"
            reasons = "; ".join([shortfall, *(counts or {}).get("errors", {})])
            result["error"] = f"{reasons}, see {result['log_file']}"
        return result

    def _judge_model(
        self, model: str, error: str | None, model_free: Json
    ) -> tuple[Verdict | None, str | None]:
        """Return the verdict about a model, or None, and the error of its test, or None."""
        started, name, verdict = time.monotonic(), f"scoring {model}", None
        if error is None:
            try:
                verdict = self.show_step(
                    name, lambda: score_answers(self.context, model, model_free)
                )
            except LachesisError as problem:
                error = str(problem)
            status: Literal["passed", "failed"] = "failed" if error else "passed"
            seconds = time.monotonic() - started
            self.add_stage(Stage(name=name, status=status, seconds=seconds, message=error))
            if verdict is not None:
                return verdict, None
        counters_file = self.context.tests.get_counters_file(self.test, model)
        # A fault of the endpoint says nothing about the environment.
        if read_failure_kind(counters_file) in ("transport", "endpoint"):
            return None, error
        # The counts say more than the end of the process.
        errors = "; ".join((read_counts(counters_file) or {}).get("errors") or {})
        return judge_learnability(InferenceCounts(), error=errors or error), error

    def _make_forecast(self, usage: GroupSums) -> Forecast | None:
        """Return the planned run's forecast from measured sums; None without a plan."""
        planned, home = self.test.planned, self.context.tests.home
        if planned is None:
            return None
        return make_forecast(
            usage,
            planned,
            self.context.config.prices,
            step_seconds=find_earlier_step_time(home, self.test.fingerprint, planned),
            storage_price=find_storage_price(home),
        )

    def _make_broken_result(self, model: str, reason: str) -> Json:
        """Return the result of a model that gave none, for a reason."""
        verdict = None
        if not self._has_prompts:
            verdict = judge_learnability(InferenceCounts(), error=reason)
        return make_model_result(
            self.context.tests.get_output_file(self.test, model),
            model,
            make_wandb_run_name(self.test),
            error=reason,
            prompts=self._has_prompts,
            verdict=verdict,
        )
