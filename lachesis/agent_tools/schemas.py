"""Define the answers of the tools as types, from which the JSON schemas for agents are made."""

from __future__ import annotations

from typing import Any

from lachesis.base.json_text import Json, ResponseModel
from lachesis.inference_tests.forecast import Forecast
from lachesis.inference_tests.store import Stage
from lachesis.inference_tests.verdict import Verdict
from lachesis.reporting.run_schemas import QueuePlace, RunStatus


class EnvironmentEntry(ResponseModel):
    name: str
    class_name: str
    file_path: str
    description: str
    """First line of the environment's docstring."""


class EnvironmentList(ResponseModel):
    environments: list[EnvironmentEntry]
    count: int
    tips: list[str]
    problems: dict[str, str] | None = None
    """Files that are not valid Python, with the error."""
    clashes: dict[str, str] | None = None
    """Environments that were renamed because their name was taken, with the reason."""


class FieldView(ResponseModel):
    name: str
    section: str
    """Section of the configuration: env, tinker or openai."""
    type: str
    default: Any
    """Default of the class; the profile may set another value."""
    allowed: str | None = None
    """Allowed type and range in words, if the range is limited."""
    description: str
    current_value: Any
    """The value that a run would have if it were started now."""


class LockedFieldView(ResponseModel):
    name: str
    section: str
    type: str
    default: Any
    """Default of the class; the profile may set another value."""
    description: str
    current_value: Any
    """The value that a run would have if it were started now."""
    locked_value: Any
    reason: str
    """Why the field is locked."""


class SelectAnswer(ResponseModel):
    message: str
    environment: str
    file_path: str
    profile: str
    config: Json
    """The editable fields with their values."""
    warning: str | None = None
    session: str
    """The name under which this selection is kept."""


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
    """The editable fields with their values."""
    problem: str | None = None
    """Why a run could not start with these values together; edit another field to fix it."""


class PlannedService(ResponseModel):
    name: str
    port: int | None
    """A port that is free now; it is chosen again at the start. Null if the service does not
    listen.
    """
    command: list[str]
    log: str


class StartAnswer(ResponseModel):
    """A run that was started, or what a start would do (`dry_run`, or a preview that needs
    `confirm`).
    """

    message: str
    server_started: str | None = None
    """Present if this call has started the Prefect server of this home."""
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
    """Present while the run waits for a free place on this host."""
    duplicate: bool | None = None
    """True if this is the run of an earlier, equal call."""
    dry_run: bool | None = None
    confirmation_required: bool | None = None
    """True if nothing was started because the profile may cost money; call again with confirm=true.
    """
    profile: str | None = None
    base_model: str | None = None
    problem: str | None = None
    """Why it could not start now."""
    forecast: Forecast | None = None
    """Tokens, time and money of the whole run, if a test has measured them."""
    config_yaml: str | None = None
    """The whole configuration as the run's processes would read it."""
    services: list[PlannedService] | None = None
    """The processes in the order of their start."""
    next_steps: list[str]


class RateLimitedStatus(RunStatus):
    """The status of a run. If it was asked for too soon, `rate_limited` is true and this is the
    last report.
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
    """True if nothing was done yet; call again with confirm=true."""


class TestedStep(ResponseModel):
    step: int
    completions: int
    correct: int
    """Completions with a score above 0."""
    scores: list[float]


class ScoredResponse(ResponseModel):
    text: str | None
    score: float | None
    """Null if the verifier had nothing to compare with."""


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
    """Number of items and 95 % interval of the accuracy: `items`, `low`, `high`. The items are the
    groups, because answers to the same item are not independent.
    """
    step_success_interval: Json | None = None
    """The same for `step_success_rate`."""
    prompts: list[AnsweredPrompt] | None = None
    verdict: Verdict | None = None
    """Whether this model can learn from the environment, with the evidence; absent if prompts were
    given.
    """
    forecast: Forecast | None = None
    """What a run with the draft's values would take, from measurements with this model."""
    cost_usd: float | None = None
    """What this test has cost, for a model at a Tinker server with a known price."""
    error: str | None = None
    """Why the test of this model is incomplete."""


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
    """The verdict of the best model: learnable, too easy, too hard or broken."""
    forecast: Forecast | None = None
    """The forecast for the best model."""
    cost_usd: float | None = None
    """What the test of all models has cost, as far as their prices are known."""


class TestReport(ResponseModel):
    """The result of an inference test, or its progress."""

    __test__ = False  # tells pytest that this is not a test class

    test_id: str
    status: str
    """pending, running, completed or failed."""
    message: str | None = None
    server_started: str | None = None
    """Present if this call has started the Prefect server of this home."""
    environment: str
    environment_file: str
    test_config: TestConfig | None = None
    models_tested: list[TestedModel] | None = None
    summary: TestSummary | None = None
    error: str | None = None
    stages: list[Stage]
    """import, config, dataset and model-free check, then inference and scoring per model."""
    groups_done: int
    groups_total: int
    next_steps: list[str]


class CheckLine(ResponseModel):
    name: str
    status: str
    """passed, warned, failed or not supported."""
    message: str
    seconds: float


class EnvironmentCheck(ResponseModel):
    """The result of an environment check, or its progress."""

    check_id: str
    status: str
    """running or completed; failed if the check itself could not continue."""
    ok: bool | None = None
    """Whether nothing has failed; null while the check is running."""
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
    """Time of creation in UTC, ISO 8601."""
    learning: str
    """The word of the judgement: too early, healthy, not learning, suspect, broken or unknown."""
    evidence: str | None
    """The first evidence for that judgement."""
    stalled: str | None = None
    """Which part of a running run stands still, since when, and how that shows."""


class RunList(ResponseModel):
    runs: list[RunEntry]
    """The runs, newest first."""
    count: int
    """Number of all runs, including those beyond `limit`."""
    warning: str | None = None
    """What prevents the statuses from being up to date."""


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
    note: str | None = None
    """Names what is not there yet and comes by itself."""
