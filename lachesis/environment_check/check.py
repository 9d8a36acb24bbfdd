"""Run `lachesis env check`: everything about an environment that can be known in half a minute.

It needs no Prefect server. The checks are:

    import, config, dataset, model-free check
                   as in a validation; see `lachesis.environment_process.model_free_check`
    rollout        a group of answers of a local model, scored
    tokens         what would be trained on: lengths, masks, log-probabilities
    round trip     the prompt's ids are those of its text
    stop tokens    answers end with one, and no turn ends twice
    truncation     the token limit does not truncate the answers
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lachesis.base.errors import LachesisError
from lachesis.base.files import write_private
from lachesis.base.json_text import Json, read_json_lines
from lachesis.config.launch_spec import TestSpec
from lachesis.config.run_config import RunConfig
from lachesis.environment_catalog.scan import Environment
from lachesis.environment_check.stages import StageChild, StageResult, run_stages, serve_base_model
from lachesis.environment_check.token_checks import (
    CheckResult,
    check_round_trip,
    check_stop_tokens,
    check_tokens,
    check_truncation,
)
from lachesis.runs.environment_counters import read_counts
from lachesis.supervision.readiness import wait_until_ended
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.services.inference_test import (
    make_inference_test_spec,
    make_process_config,
)

if TYPE_CHECKING:
    pass

GROUP_SIZE = 8
ROLLOUT_TIMEOUT_S = 120.0
MAX_TRUNCATED_SHARE = 0.5
PASSED_MESSAGES = {
    "dataset": "{items} items tried, {distinct} different",
    "model-free check": "{gold_right} of {items} right answers score as right, {corrupt_wrong} "
    "corrupted ones lower",
}
ResultCallback = Callable[[CheckResult], None]


def run_environment_checks(
    environment: Environment,
    config: RunConfig,
    folder: Path,
    on_result: ResultCallback = lambda line: None,
) -> list[CheckResult]:
    """Run all checks, until one fails that makes the others meaningless.

    Args:
        environment: The environment.
        config: The configuration that it runs with.
        folder: An empty folder, which holds the logs afterwards.
        on_result: Called with each result as soon as it is known.
    """
    results: list[CheckResult] = []

    def add(result: CheckResult) -> bool:
        results.append(result)
        on_result(result)
        return result.status != "failed"

    with ServiceGroup() as group:
        child = StageChild(group, environment.file_path, environment.class_name, config, folder)
        stages = run_stages(child, lambda name, wait: wait())
        has_passed = all(add(_to_check_result(stage)) for stage in stages)
    if has_passed:
        started = time.monotonic()
        try:
            groups, counts = _sample_group(environment, config, folder)
        except LachesisError as error:
            errors = _format_errors(read_counts(folder / "counters.json") or {})
            if errors:
                message = f"{errors}; the traceback is in {folder / 'rollout.log'}"
            else:
                message = str(error)
            add(CheckResult("rollout", "failed", message, time.monotonic() - started))
            return results
        for result in _check_rollouts(
            groups, counts, config.openai.model_name, time.monotonic() - started
        ):
            add(result)
    return results


def _to_check_result(stage: StageResult) -> CheckResult:
    message = stage.message
    if stage.status == "passed":
        message = PASSED_MESSAGES.get(stage.name, "").format(**stage.detail)
    return CheckResult(stage.name, stage.status, message, stage.seconds)


def _sample_group(
    environment: Environment, config: RunConfig, folder: Path
) -> tuple[list[Json], Json]:
    """Return a group of the model's answers as the environment would send it, and the counts."""
    output = folder / "rollout.jsonl"
    test_spec = TestSpec(environment=environment.name, steps=1, group_size=GROUP_SIZE)
    with ServiceGroup() as group:
        plan = serve_base_model(group, config, config.openai.model_name, folder / "server")
        content = make_process_config(
            plan.config, test_spec, output, plan.config.openai.model_dump(mode="json"), "check"
        )
        output_files = {
            "output": output,
            "counters": folder / "counters.json",
            "samples": folder / "samples.jsonl",
        }
        spec = {**{name: str(file) for name, file in output_files.items()}, "wandb_run": "check"}
        service, files = make_inference_test_spec(
            environment.file_path,
            content,
            output,
            spec,
            client_env=plan.client_env,
            timeout_s=ROLLOUT_TIMEOUT_S,
        )
        for path, text in files.items():
            write_private(path, text)
        group.start(service)
        wait_until_ended(group, service, needs=[])
    return read_json_lines(output), read_counts(folder / "counters.json") or {}


def _check_rollouts(
    groups: list[Json], counts: Json, model: str, seconds: float
) -> list[CheckResult]:
    """Return whether rollouts were made and scored, with their scores and reasons."""
    errors = _format_errors(counts)
    if not groups:
        return [
            CheckResult(
                "rollout",
                "failed",
                f"no group was made: {errors or 'the environment dropped it'}",
                seconds,
            )
        ]
    from transformers import AutoTokenizer

    group, tokenizer = groups[0], AutoTokenizer.from_pretrained(model)
    scores = ", ".join(f"{score:g}" for score in group["scores"])
    invalid = int(counts.get("invalid_rollouts", 0))
    message = f"{len(group['scores'])} answers scored {scores}"
    if invalid:
        message += f"; {invalid} of them invalid: {errors}"
    if not invalid and not any(group["scores"]):
        message += ", as is usual for a model that does not know the task"
    tokens = check_tokens(group)
    results = [CheckResult("rollout", "warned" if invalid else "passed", message, seconds), tokens]
    if tokens.status != "failed":
        results += [
            check_round_trip(group, tokenizer),
            check_stop_tokens(group, tokenizer.eos_token_id),
        ]
    return [*results, check_truncation(counts)]


def _format_errors(counts: Json) -> str:
    return "; ".join(
        f"{text} ({count} times)" for text, count in (counts.get("errors") or {}).items()
    )
