"""Whether an environment, as its code and fields are now, has a fresh validation that says it can be learned from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from lachesis.base.errors import ValidationMissingError
from lachesis.catalog.fingerprint import compute_fingerprint
from lachesis.config.run_config import RunConfig
from lachesis.runs.store import seconds_between
from lachesis.validation.forecast import Forecast, Planned, rescaled
from lachesis.validation.tests import InferenceTest, InferenceTests

FRESH_S = 7 * 86400.0


def planned(config: RunConfig) -> Planned:
    """The run that this configuration makes, as far as a forecast needs it."""
    return Planned(
        total_steps=config.env.total_steps,
        batch_size=config.env.batch_size,
        group_size=config.env.group_size,
        base_model=config.openai.model_name,
        profile=config.profile,
        evaluations=_evaluations(config),
    )


def _evaluations(config: RunConfig) -> int:
    """Return how often the run evaluates: at step 0, at each multiple of `steps_per_eval`, and before and after training."""
    every, steps, final = config.env.steps_per_eval, config.env.total_steps, config.tinker.final_evaluation
    scheduled = steps // every + 1 if every > 0 else 0
    if not final:
        return scheduled
    return scheduled + 2 - int(every > 0 and steps % every == 0)  # the last one is the one after training


def require_validation(tests: InferenceTests, config: RunConfig, files: Mapping[str, str]) -> list[InferenceTest]:
    """For each environment of the run, whose files are given by name, the newest test that allows it: of the same code and the
    same values of the environment's own fields, at most seven days old, with the verdict `learnable`. Raises
    ValidationMissingError that says what is missing."""
    return [_allowing(tests, part, files[name]) for name, part in config.build_environment_configs().items()]


def _allowing(tests: InferenceTests, config: RunConfig, environment_file: str) -> InferenceTest:
    mine = [test for test in tests.all() if test.request.environment == config.environment and test.request.prompts is None]
    own = config.env.model_extra or {}
    code = compute_fingerprint(Path(environment_file), own)
    reasons = []
    for test in mine:
        reason = _against(test, code, own)
        if reason is None:
            return test
        reasons.append(f"test {test.test_id} {reason}")
    what = reasons[0] if reasons else "it was never validated"
    raise ValidationMissingError(
        f"{config.environment} has no fresh successful validation: {what}; `lachesis test`, with this "
        "environment and these values, or rl_test_inference makes one",
        environment=config.environment,
        fingerprint=code,
    )


def _against(test: InferenceTest, code: str, own: dict[str, object]) -> str | None:
    """Why this test does not allow the run, or None when it does."""
    if test.status != "completed":
        return f"is {test.status}" + (f": {(test.error or '').splitlines()[0][:200]}" if test.error else "")
    if test.verdict is None:
        return "has no verdict, as no model could be asked"
    if test.fingerprint != code:
        return "was made before the environment's code was changed"
    changed = sorted(key for key in {*own, *test.own_values} if own.get(key) != test.own_values.get(key))
    if changed:
        return f"was made with other values of {', '.join(changed[:5])}"
    if test.verdict != "learnable":
        return f"found it {test.verdict}: {_evidence(test)}"
    age = seconds_between(test.ended_at or test.created_at)
    return f"is {age / 86400:.0f} days old; the limit is {FRESH_S / 86400:.0f}" if age > FRESH_S else None


def _evidence(test: InferenceTest) -> str:
    verdicts = [one.get("verdict") or {} for one in (test.result or {}).get("models_tested", [])]
    return "; ".join(sentence for verdict in verdicts for sentence in verdict.get("evidence", [])[:1])[:300]


def known_forecast(tests: InferenceTests, config: RunConfig, code: str) -> Forecast | None:
    """What the newest test of this code on the run's model expects of such a run, scaled to its steps and rollouts."""
    wanted = planned(config)
    for test in tests.all():
        made = ((test.result or {}).get("summary") or {}).get("forecast")
        if made is None or test.fingerprint != code:
            continue
        try:
            found = Forecast.model_validate(made)
        except ValidationError:
            continue
        if (found.planned.base_model, found.planned.profile) == (wanted.base_model, wanted.profile):
            return rescaled(found, wanted.model_copy(update={"evaluation_answers": found.planned.evaluation_answers}))
    return None
