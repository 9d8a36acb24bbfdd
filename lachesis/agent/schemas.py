"""What the tools answer, as types: they make the JSON schemas that agents are shown."""

from __future__ import annotations

from typing import Any

from lachesis.base.json_text import Json
from lachesis.base.response_model import ResponseModel
from lachesis.reporting.run_answers import QueuePlace, RunStatus
from lachesis.validation.forecast import Forecast
from lachesis.validation.inference_tests import Stage
from lachesis.validation.verdict import Verdict


class EnvironmentEntry(ResponseModel):
    name: str
    class_name: str
    file_path: str
    description: str
    """The first line of the environment's docstring."""


class EnvironmentList(ResponseModel):
    environments: list[EnvironmentEntry]
    count: int
    tips: list[str]
    problems: dict[str, str] | None = None
    """Files that could not be read as Python, with the reason."""
    clashes: dict[str, str] | None = None
    """Environments that go by another name than their own because it was taken, with the reason."""


class FieldView(ResponseModel):
    name: str
    section: str
    """env, tinker or openai."""
    type: str
    default: Any
    """Of the class; the profile may set another value."""
    allowed: str | None = None
    """Type and limits in words, where there are limits."""
    description: str
    current_value: Any
    """What a run would have if it were started now."""


class LockedFieldView(ResponseModel):
    name: str
    section: str
    type: str
    default: Any
    """Of the class; the profile may set another value."""
    description: str
    current_value: Any
    """What a run would have if it were started now."""
    locked_value: Any
    reason: str
    """Why it is locked."""


class SelectAnswer(ResponseModel):
    message: str
    environment: str
    file_path: str
    profile: str
    config: Json
    """The fields that can be edited, with their values."""
    warning: str | None = None
    session: str
    """The name under which this choice is kept."""


class CurrentConfig(ResponseModel):
    environment: str
    profile: str
    model: str
    """The base model: a Hugging Face name or a folder."""
    configurable_fields: list[FieldView]
    locked_fields: list[LockedFieldView]
    tip: str
    problem: str | None = None
    """Why a run could not start with these values together."""
    warning: str | None = None


class EditAnswer(ResponseModel):
    message: str
    field: str
    value: Any
    config: Json
    """The fields that can be edited, with their values."""
    problem: str | None = None
    """Why a run could not start with these values together; edit another field to mend it."""


class PlannedService(ResponseModel):
    name: str
    port: int | None
    """Free now; chosen again at the start. Null when it does not listen."""
    command: list[str]
    log: str


class StartAnswer(ResponseModel):
    """A run that was started, or what a start would do (`dry_run`, or a preview that waits for
    `confirm`).
    """

    message: str
    run_id: str | None = None
    status: str | None = None
    """"starting" for a new run."""
    environment: str
    config: Json
    wandb_project: str
    wandb_run_name: str | None = None
    config_path: str | None = None
    logs: dict[str, str] | None = None
    ui_url: str | None = None
    queue: QueuePlace | None = None
    """While the run waits for a free place on this host."""
    duplicate: bool | None = None
    """True when this is the run of an earlier, equal call."""
    dry_run: bool | None = None
    confirmation_required: bool | None = None
    """True when nothing was started because the profile may cost money; call again with
    confirm=true.
    """
    profile: str | None = None
    base_model: str | None = None
    problem: str | None = None
    """Why it could not start now."""
    config_yaml: str | None = None
    """The whole configuration as the run's processes would read it."""
    services: list[PlannedService] | None = None
    """The processes in the order of their start."""
    next_steps: list[str]


class RateLimitedStatus(RunStatus):
    """How a run is doing. When it was asked too soon, `rate_limited` is true and this is the last
    report.
    """

    rate_limited: bool | None = None
    message: str | None = None
    next_check_in_seconds: int | None = None
    reported_seconds_ago: int | None = None


class StopAnswer(ResponseModel):
    message: str
    run_id: str
    status: str
    confirmation_required: bool | None = None
    """True when nothing was done yet; call again with confirm=true."""


class TestedStep(ResponseModel):
    step: int
    completions: int
    correct: int
    """Completions with a score above 0."""
    scores: list[float]


class ScoredResponse(ResponseModel):
    text: str | None
    score: float | None
    """Null when the verifier had nothing to compare with."""


class AnsweredPrompt(ResponseModel):
    prompt: str
    responses: list[ScoredResponse]
    note: str | None = None


class TestedModel(ResponseModel):
    model: str
    name: str
    scale: str
    wandb_run: str
    output_file: str
    log_file: str
    steps: list[TestedStep]
    steps_tested: int
    total_completions: int
    correct_completions: int
    accuracy: float
    """Share of the completions that are correct, from 0 to 1."""
    steps_with_correct: int
    step_success_rate: float
    """Share of the steps with at least one correct completion, from 0 to 1."""
    accuracy_interval: Json | None = None
    """Number of items and 95 % interval of the accuracy: `items`, `low`, `high`. Items are steps,
    as answers to one item are not independent.
    """
    step_success_interval: Json | None = None
    """The same of `step_success_rate`."""
    prompts: list[AnsweredPrompt] | None = None
    verdict: Verdict | None = None
    """Whether this model can learn from the environment, with the evidence; absent with prompts."""
    forecast: Forecast | None = None
    """What a run with the draft's values would take, by what was measured with this model."""
    error: str | None = None
    """Why this model's test is not complete."""


class TestConfig(ResponseModel):
    num_steps: int
    group_size: int
    rollouts_per_model: int
    total_rollouts: int


class TestSummary(ResponseModel):
    steps_requested: int
    models_tested: int
    models_succeeded: int
    best_model: str | None
    avg_accuracy: float
    environment_working: bool
    output_directory: str
    verdict: str | None = None
    """Of the most hopeful model: learnable, too easy, too hard or broken."""
    forecast: Forecast | None = None
    """With the best model."""


class TestReport(ResponseModel):
    """An inference test, or how far it is."""

    __test__ = False  # no test class of pytest

    test_id: str
    status: str
    """pending, running, completed or failed."""
    message: str | None = None
    environment: str
    environment_file: str
    test_config: TestConfig | None = None
    models_tested: list[TestedModel] | None = None
    summary: TestSummary | None = None
    error: str | None = None
    stages: list[Stage]
    """import, config, dataset, model-free check, then inference and scoring per model."""
    groups_done: int
    groups_total: int
    next_steps: list[str]


class CheckLine(ResponseModel):
    name: str
    status: str
    """passed, warned, failed, or not offered."""
    message: str
    seconds: float


class EnvironmentCheck(ResponseModel):
    """What a check of an environment has found, or how far it is."""

    check_id: str
    status: str
    """running, completed, or failed where the check itself could not go on."""
    ok: bool | None = None
    """Whether nothing has failed; null while it goes on."""
    message: str
    environment: str
    environment_file: str
    checks: list[CheckLine]
    """import, config, dataset, model-free check, rollout, tokens, round trip, stop tokens,
    truncation.
    """
    logs: str
    next_steps: list[str]


class RunEntry(ResponseModel):
    run_id: str
    environment: str
    status: str
    wandb_run_name: str
    profile: str
    created_at: str
    """UTC, ISO 8601."""
    learning: str
    """The word of the judgement: too early, healthy, not learning, suspect, broken or unknown."""
    evidence: str | None
    """The first evidence for that word."""


class RunList(ResponseModel):
    runs: list[RunEntry]
    """The newest first."""
    count: int
    """All there are, also those beyond `limit`."""
    warning: str | None = None
    """What keeps the statuses from being up to date."""


class ServiceHealth(ResponseModel):
    status: str
    """ok, or degraded with its `problems`."""
    version: str
    problems: list[str]
    prefect_url: str | None
    profile: str
    """The profile of new selections in this session."""
    missing_keys: list[str]
    environments_discovered: int
    current_environment: str | None
    active_runs: list[str]
    max_runs: int
    session: str
    home: str
