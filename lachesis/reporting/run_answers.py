"""The answers about a run: its status and its results, as typed models."""

from __future__ import annotations

from lachesis.base.json_text import Json
from lachesis.base.response_model import ResponseModel
from lachesis.runs.export import WeightLocations
from lachesis.runs.held_out import HeldOutPoint


class RunProgress(ResponseModel):
    step: int
    """Training steps done."""
    total: int
    """Training steps of the whole run."""
    eta_seconds: float | None
    """Estimated seconds to the last step; null before the second step and after the end."""


class QueuePlace(ResponseModel):
    place: int
    """1 is the next to start."""
    running: int
    """Runs on this host now."""
    limit: int
    """Most runs at once on this host."""


class LastError(ResponseModel):
    message: str
    service: str | None
    """The process that died first, when one did."""
    log: str | None
    """Its log file."""
    log_tail: str
    """The last lines of that log."""


class StatusMetrics(ResponseModel):
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
    """How a run is doing."""

    run_id: str
    status: str
    """pending, starting, running, stopping, stopped, completed or failed."""
    phase: str
    """What the run is doing inside that status, in words."""
    environment: str
    profile: str
    running_time_minutes: float
    processes: dict[str, str]
    """Per process (api, trainer, env; engine on the embedded profile): pending, starting, running
    or exited (code).
    """
    progress: RunProgress
    queue: QueuePlace | None = None
    """While the run waits for a free place on this host."""
    wandb_project: str
    wandb_run_name: str
    wandb_url: str | None = None
    wandb_error: str | None = None
    checkpoints: list[int]
    """Steps of those that can be gone on from."""
    resumed: Json | None = None
    """What this attempt went on from."""
    forked_from: str | None = None
    """RUN@STEP, the checkpoint of another run that this one has begun from."""
    logs: dict[str, str]
    metrics: StatusMetrics
    held_out_curve: list[HeldOutPoint]
    """Results on held-out items by step, during training and at its ends."""
    evaluation: Json | None = None
    """Evaluations during training that failed: how many, and why the last one did."""
    rollouts: Json | None = None
    """Of this attempt's environment, once there is something to say: `scored` and `invalid`
    rollouts, the reasons of invalid ones (`invalid_reasons`) and of rewards of 0 that have one
    (`zero_reasons`), each with its count.
    """
    dead_environments: dict[str, str] | None = None
    """Of several environments those whose groups were all invalid, for which the others wait, each
    with what is wrong."""
    health: Json | None
    """The monitor's last verdict; null before it has looked."""
    error: str | None = None
    last_error: LastError | None = None
    ui_url: str | None
    """The run's page in the Prefect UI."""
    next_steps: list[str]
    warning: str | None = None
    """What keeps this report from being up to date."""


class RunResults(ResponseModel):
    """What came of a run."""

    run_id: str
    status: str
    environment: str
    base_model: str
    wandb_project: str
    wandb_run_name: str
    wandb_url: str | None = None
    wandb_dir: str | None = None
    """Where W&B's offline files are, when the run was not online."""
    reward: dict[str, float | None]
    """First and last mean reward, each over five steps, or over half of the steps of a shorter run.
    """
    held_out: dict[str, float | None]
    """Accuracy on held-out items before and after training."""
    held_out_intervals: dict[str, Json]
    """For each of these accuracies its number of items and its 95 % interval: `items`, `low`,
    `high`.
    """
    held_out_curve: list[HeldOutPoint]
    """Results on held-out items by step, during training and at its ends."""
    evaluation: Json | None = None
    """Evaluations during training that failed: how many, and why the last one did."""
    weights: WeightLocations
    final_metrics: Json
    history: list[Json]
    """The chief metrics of at most ten steps, evenly spread, first and last among them."""
    metrics_file: str
    """Every step, one JSON object per line."""
    forecast: Json | None = None
    """What a validation of the same code expected of the whole run: tokens, hours and US dollars as
    ranges.
    """
    actual: Json | None = None
    """What it took until now, and the ratio to the forecast for the steps that were made."""
    health: Json | None = None
    """The last judgement of the monitor."""
    rollouts: Json | None = None
    """As in the status: which rollouts could not be scored, and which rewards of 0 have a reason.
    """
    error: str | None = None
    next_steps: list[str]
