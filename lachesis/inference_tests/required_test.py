"""Require a recent successful validation of an environment with its current code and fields."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lachesis.base.errors import ValidationMissingError
from lachesis.base.json_text import Json
from lachesis.base.timestamps import seconds_between
from lachesis.config.prices import find_storage_price
from lachesis.config.run_config import RunConfig
from lachesis.environment_catalog.fingerprint import compute_fingerprint
from lachesis.environment_catalog.lookup import get_name_or_file
from lachesis.inference_tests.forecast import Forecast, GroupSums, PlannedRun, make_forecast
from lachesis.inference_tests.planned_run import find_earlier_step_time
from lachesis.inference_tests.store import InferenceTest, InferenceTestStore, make_tested_name
from lachesis.models.find_model import compute_template_digest, read_model_settings
from lachesis.models.recommended_settings import estimate_checkpoint_gb
from lachesis.runs.suggested_commands import LaunchCommand

MAX_VALIDATION_AGE_S = 7 * 86400.0


def make_planned_run(config: RunConfig, *, starts_from_base: bool) -> PlannedRun:
    """Return the planned run of this configuration, as a forecast needs it."""
    return PlannedRun(
        total_steps=config.env.total_steps,
        batch_size=config.env.batch_size,
        group_size=config.env.group_size,
        base_model=config.openai.model_name,
        profile=config.profile,
        evaluations=_count_evaluations(config, starts_from_base=starts_from_base),
        has_kl_penalty=config.tinker.kl_coefficient > 0,
        kept_checkpoints=_count_kept_checkpoints(config),
        checkpoint_gb=estimate_checkpoint_gb(
            read_model_settings(config.openai.model_name), config.tinker.lora_rank
        ),
    )


def _count_kept_checkpoints(config: RunConfig) -> int:
    """Return how many checkpoints a run keeps: the newest, the best and the final checkpoint."""
    saved = config.env.total_steps // config.tinker.save_checkpoint_interval + 1
    return min(saved, config.tinker.keep_checkpoints + 2)


def _count_evaluations(config: RunConfig, *, starts_from_base: bool) -> int:
    """Return how often the run evaluates: at each multiple of `steps_per_eval`; with
    `final_evaluation` at step 0, at the last step, and once the base model where the start is not.
    """
    every, steps = config.env.steps_per_eval, config.env.total_steps
    due = set(range(0, steps + 1, every)) if every > 0 else set()
    if not config.tinker.final_evaluation:
        return len(due)
    return len(due | {0, steps}) + int(not starts_from_base)


def require_validation(
    tests: InferenceTestStore,
    config: RunConfig,
    files: Mapping[str, str],
    set_fields: Mapping[str, Any] | None = None,
) -> list[InferenceTest]:
    """Return the newest test that allows each environment of the run.

    Such a test is about the same code, values of the environment's own fields, model, profile, chat
    template and length of a rollout, is at most seven days old, and has the verdict `learnable`.

    Args:
        tests: The tests of this home.
        config: The configuration of the run.
        files: The files of the run's environments by name.
        set_fields: The fields that were set, which the test that the message advises sets too.

    Raises:
        ValidationMissingError: There is no such test; the message says why.
    """
    return [
        _find_valid_test(
            tests,
            part,
            files[name],
            LaunchCommand(
                environment=get_name_or_file(name, files[name]),
                profile=config.profile,
                model=config.openai.model_name,
                settings=_select_fields(set_fields or {}, is_main=name == config.environment),
            ).format_test(),
        )
        for name, part in config.build_environment_configs().items()
    ]


def _select_fields(set_fields: Mapping[str, Any], *, is_main: bool) -> dict[str, Any]:
    """Return the fields that a test of one environment of a run sets.

    Fields of the run's own environment need not be those of a further one.
    """
    return {
        name: value for name, value in set_fields.items() if is_main or not name.startswith("env.")
    }


def _find_valid_test(
    tests: InferenceTestStore, config: RunConfig, environment_file: str, test_command: str
) -> InferenceTest:
    """Return the newest test that allows the run, or raise ValidationRequiredError."""
    environment_tests = [
        test
        for test in tests.all()
        if test.request.environment == config.environment and test.request.spec.prompts is None
    ]
    own_values = config.env.model_extra or {}
    code_fingerprint = compute_fingerprint(Path(environment_file), own_values)
    # The tests come newest first, so the first reason is that of the newest one.
    reasons = []
    for test in environment_tests:
        reason = _find_objection(test, config, code_fingerprint)
        if reason is None:
            return test
        reasons.append(f"test {test.test_id} {reason}")
    first_reason = reasons[0] if reasons else "it has never been validated"
    raise ValidationMissingError(
        f"{config.environment} has no recent successful validation: {first_reason}; run "
        f"`{test_command}` or rl_test_inference with this environment and these values. "
        "`lachesis train … --without-validation` starts a run without one",
        environment=config.environment,
        fingerprint=code_fingerprint,
    )


def _find_objection(test: InferenceTest, config: RunConfig, code_fingerprint: str) -> str | None:
    """Return why this test does not allow the run, or None."""
    if test.status != "completed":
        return f"is {test.status}" + (
            f": {(test.error or '').splitlines()[0][:200]}" if test.error else ""
        )
    if test.verdict is None:
        return "has no verdict, because no model responded"
    if mismatch := find_mismatch(test, config, code_fingerprint):
        return mismatch
    verdict = (_find_model_result(test, config) or {}).get("verdict") or {}
    if verdict.get("word") != "learnable":
        evidence = "; ".join(verdict.get("evidence", [])[:1])[:300]
        return f"found it {verdict.get('word', 'without a verdict')}: {evidence}"
    age = seconds_between(test.ended_at or test.created_at)
    if age > MAX_VALIDATION_AGE_S:
        return f"is {age / 86400:.0f} days old; the limit is {MAX_VALIDATION_AGE_S / 86400:.0f}"
    return None


def find_mismatch(test: InferenceTest, config: RunConfig, code_fingerprint: str) -> str | None:
    """Return in which way a test was about something else than this run, or None.

    The environment's code and own fields, the model and where it is sampled, its chat template and
    the length of a rollout decide what a model answers.
    """
    # The fingerprint covers the file, the files that it imports, and the values of its own fields.
    if test.fingerprint != code_fingerprint:
        return "was made before the environment's code was changed"
    if changed := _list_changed_fields(test, config):
        return f"was made with other values of {', '.join(changed[:5])}"
    if _find_model_result(test, config) is None:
        tested_names = ", ".join(test.request.models)[:200]
        return (
            f"was about {tested_names}, not about {config.openai.model_name} on profile "
            f"{config.profile}"
        )
    # Rollouts of another length have other rewards and other costs.
    if test.max_token_length not in (None, config.env.max_token_length):
        return (
            f"was made with max_token_length {test.max_token_length}, not "
            f"{config.env.max_token_length}"
        )
    # A template that was not on this machine at the time of the test says nothing.
    tested_template = test.chat_templates.get(_make_tested_name(config))
    if tested_template not in (None, compute_template_digest(config.openai.model_name)):
        return f"was made before the chat template of {config.openai.model_name} was changed"
    return None


def get_prompt_settings(config: RunConfig) -> Json:
    """Return the settings that decide what a model is shown and where its answer ends."""
    names = {"thinking", "chat_template_kwargs", "stop_tokens"}
    return config.tinker.model_dump(mode="json", include=names)


def _list_changed_fields(test: InferenceTest, config: RunConfig) -> list[str]:
    """Return the environment's fields and prompt settings with other values in the test."""
    own_values = config.env.model_extra or {}
    changed = sorted(
        key
        for key in {*own_values, *test.own_values}
        if own_values.get(key) != test.own_values.get(key)
    )
    settings = get_prompt_settings(config)
    return changed + [
        name for name, value in settings.items() if test.prompt_settings.get(name, value) != value
    ]


def _make_tested_name(config: RunConfig) -> str:
    return make_tested_name(config.openai.model_name, config.profile)


def _find_model_result(test: InferenceTest, config: RunConfig) -> Json | None:
    """Return the test's result for the model that the run trains, or None."""
    if test.planned is not None and test.planned.profile != config.profile:
        return None
    for model_result in (test.result or {}).get("models_tested", []):
        if model_result.get("model") == _make_tested_name(config):
            return dict(model_result)
    return None


def find_forecast(
    tests: InferenceTestStore, config: RunConfig, code_fingerprint: str, planned_run: PlannedRun
) -> Forecast | None:
    """Return the run's forecast by the newest test of its code and model, or None."""
    for test in tests.all():
        usage = (_find_model_result(test, config) or {}).get("usage")
        if usage is None or test.planned is None or find_mismatch(test, config, code_fingerprint):
            continue
        try:
            sums = GroupSums.model_validate(usage)
        except ValidationError:
            continue
        # The environment has said how many answers an evaluation has.
        answers = test.planned.evaluation_answers
        planned_run = planned_run.model_copy(update={"evaluation_answers": answers})
        return make_forecast(
            sums,
            planned_run,
            config.prices,
            step_seconds=find_earlier_step_time(tests.home, code_fingerprint, planned_run),
            storage_price=find_storage_price(tests.home),
        )
    return None
