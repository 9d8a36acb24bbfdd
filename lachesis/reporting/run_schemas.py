"""Define the answers about a run, its status and its results, as typed models."""

from __future__ import annotations

from lachesis.base.json_text import Json, ResponseModel
from lachesis.checkpoints.export_weights import WeightLocations
from lachesis.runs.end_causes import EndCause
from lachesis.runs.held_out_results import HeldOutPoint


class RunProgress(ResponseModel):
    """How far a run is."""

    step: int
    """Training steps done."""
    total: int
    """Training steps of the whole run."""
    eta_seconds: float | None
    """Estimated seconds until the last step; null before the second step and after the end."""


class QueuePlace(ResponseModel):
    """A run's position in the queue of this host."""

    place: int
    """Position in the queue; 1 is the next run to start."""
    running: int
    """Runs that are running on this host."""
    limit: int
    """Maximum number of concurrent runs on this host."""


class LastError(ResponseModel):
    """The error that ended a run."""

    message: str
    service: str | None
    """The process that exited first, if one did."""
    log: str | None
    """Its log file."""
    log_tail: str
    """The last lines of that log."""


class StatusMetrics(ResponseModel):
    """The metrics of a run's last step."""

    step: int
    reward_mean: float | None
    """Mean score of the last step's rollouts."""
    percent_correct: float | None
    """Share of the last step's rollouts with a score above 0, from 0 to 1."""
    eval_percent_correct: float | None
    """Newest share of correct answers on held-out items, from 0 to 1."""
    loss: float | None
    """Loss of the last step per trained token."""
    state: str
    """The status of the run, as in `status`."""


class RunStatus(ResponseModel):
    """The status of a run."""

    run_id: str
    status: str
    """pending, starting, running, stopping, stopped, completed or failed."""
    phase: str
    """What the run is doing within that status, in words."""
    environment: str
    profile: str
    running_time_minutes: float
    processes: dict[str, str]
    """State per process (api, trainer, env; engine on the embedded profile): pending, starting,
    running or exited (code).
    """
    progress: RunProgress
    queue: QueuePlace | None = None
    """Present while the run waits for a free place on this host."""
    wandb_project: str
    wandb_run_name: str
    wandb_url: str | None = None
    wandb_error: str | None = None
    checkpoints: list[int]
    """Steps of the checkpoints that the run can be resumed from."""
    checkpoints_expire_at: str | None = None
    """When the server deletes the newest one, if it has a time to live."""
    resumed: Json | None = None
    """The checkpoint that this attempt was resumed from."""
    forked_from: str | None = None
    """RUN@STEP, the checkpoint of another run that this run started from."""
    logs: dict[str, str]
    metrics: StatusMetrics
    held_out_curve: list[HeldOutPoint]
    """Results on held-out items by step; 0 is the model before training."""
    evaluation: Json | None = None
    """How many evaluations have `failed`, with `last_step` and `last_reason`, and for how many
    `blocked_seconds` evaluations have delayed training.
    """
    pause: str | None = None
    """Why the Tinker server makes the run wait now, and since when; it goes on by itself."""
    rollouts: Json | None = None
    """Rollout counts of this attempt: `scored` and `invalid` rollouts, and, each with its count,
    the reasons of invalid ones (`invalid_reasons`) and of rewards of 0 (`zero_reasons`).
    """
    dead_environments: dict[str, str] | None = None
    """In a run with several environments, those whose groups were all invalid and that the others
    are waiting for, each with the problem.
    """
    health: Json | None
    """The monitor's last judgement; null before the first one."""
    end_cause: EndCause | None = None
    """Why the run has ended, as a word for programs; docs/reference/ends.md has the table."""
    error: str | None = None
    last_error: LastError | None = None
    ui_url: str | None
    """URL of the run in the Prefect UI."""
    next_steps: list[str]
    warning: str | None = None
    """What prevents this report from being up to date."""


class RunResults(ResponseModel):
    """The results of a run."""

    run_id: str
    status: str
    environment: str
    base_model: str
    wandb_project: str
    wandb_run_name: str
    wandb_url: str | None = None
    wandb_dir: str | None = None
    """Folder of W&B's offline files, if the run was not online."""
    reward: dict[str, float | None]
    """First and last mean reward, each over five steps, or over half of the steps of a shorter run.
    """
    loss: float | None = None
    """Loss of the last step that had one; 0 if no rollout of the run carried a gradient."""
    accuracy: float | None = None
    """The newest accuracy on held-out items after at least one step; without one, the share of
    rollouts of the last steps with a score above 0.
    """
    accuracy_source: str | None = None
    """Which of both it is: `held-out items` or `rollouts of training`."""
    held_out: dict[str, float | None]
    """Accuracy on held-out items before training, of the base model, and after training, of the
    last step of a run that has ended."""
    held_out_intervals: dict[str, Json]
    """For each of these accuracies, its number of items and its 95 % interval: `items`, `low`,
    `high`.
    """
    held_out_curve: list[HeldOutPoint]
    """Results on held-out items by step; 0 is the model before training."""
    evaluation: Json | None = None
    """How many evaluations have `failed`, with `last_step` and `last_reason`, and for how many
    `blocked_seconds` evaluations have delayed training.
    """
    weights: WeightLocations
    final_metrics: Json
    history: list[Json]
    """The main metrics of at most ten evenly spaced steps, including the first and the last."""
    metrics_file: str
    """File with the metrics of every step, one JSON object per line."""
    forecast: Json | None = None
    """What a validation of the same code forecast for the whole run: ranges of tokens, hours and US
    dollars.
    """
    actual: Json | None = None
    """What the run has used so far, and its ratio to the forecast for the steps that were made."""
    health: Json | None = None
    """The last judgement of the monitor."""
    rollouts: Json | None = None
    """Rollout counts as in the status: which rollouts could not be scored, and the reasons of
    rewards of 0.
    """
    end_cause: EndCause | None = None
    error: str | None = None
    next_steps: list[str]
