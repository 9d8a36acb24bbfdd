"""Define the answers about a run, its status and its results, and lay a `RunView` out as them."""

import statistics
from collections.abc import Mapping, Sequence

from lachesis.base.json_text import Json, ResponseModel
from lachesis.checkpoints.export_weights import WeightLocations
from lachesis.reporting.next_steps import NEXT_STEP_COMMANDS
from lachesis.reporting.run_view import LastError, RunView, find_log_files
from lachesis.runs.end_causes import EndCause
from lachesis.runs.folder import shorten_service_name
from lachesis.runs.held_out_results import HeldOutPoint, find_newest_accuracy, read_held_out_points
from lachesis.runs.metrics import Step, sample_history, select_key_metrics
from lachesis.runs.record import RunRecord


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


def build_run_status(
    view: RunView,
    *,
    phase: str = "",
    ui_url: str | None = None,
    queue: Mapping[str, int] | None = None,
    warning: str | None = None,
    next_step_templates: Mapping[str, str] = NEXT_STEP_COMMANDS,
) -> RunStatus:
    """Return the status of a run as data for a program.

    Args:
        view: The run.
        phase: What it is doing; by default as its record says.
        ui_url: Its page in Prefect.
        queue: Its place in the queue of this host, if it waits there.
        warning: What prevents the report from being up to date.
        next_step_templates: The next steps of the user interface.
    """
    record = view.record
    optional_fields: Json = {
        **record.model_dump(
            include={"wandb_url", "wandb_error", "resumed", "forked_from", "end_cause", "error"}
        ),
        "queue": queue,
        "dead_environments": record.dead_environments,
        "pause": view.pause,
        "last_error": view.last_error,
        "rollouts": view.rollout_reasons,
        "evaluation": view.evaluation_faults,
        "warning": warning,
        "checkpoints_expire_at": next(
            (manifest.expires_at for manifest in reversed(view.manifests)), None
        ),
    }
    return RunStatus(
        run_id=record.run_id,
        status=record.status,
        phase=phase or record.phase,
        environment=record.environment,
        profile=record.profile,
        running_time_minutes=view.running_minutes,
        processes=list_process_states(record),
        progress=RunProgress(
            step=view.summary.step, total=record.total_steps, eta_seconds=view.eta_s
        ),
        wandb_project=record.wandb_project,
        wandb_run_name=record.wandb_run_name,
        checkpoints=[manifest.step for manifest in view.manifests],
        logs=find_log_files(record, view.run_dir),
        metrics=_build_metrics(view),
        held_out_curve=view.curve,
        health=record.health,
        ui_url=ui_url,
        next_steps=view.list_next_steps(next_step_templates),
        **{key: value for key, value in optional_fields.items() if value},
    )


def _build_metrics(view: RunView) -> StatusMetrics:
    """Return the metrics of the last step under the names that users rely on."""
    return StatusMetrics(
        step=view.summary.step,
        reward_mean=view.last_step.get("reward/mean"),
        percent_correct=view.last_step.get("train/percent_correct"),
        eval_percent_correct=find_newest_accuracy(view.curve),
        loss=view.last_step.get("train/loss"),
        state=view.record.status,
    )


def list_process_states(record: RunRecord) -> dict[str, str]:
    """Return the state per process; the three processes of every run are always present."""
    states = {
        shorten_service_name(name): service.state for name, service in record.services.items()
    }
    return {**dict.fromkeys(("api", "trainer", "env"), "pending"), **states}


def build_run_results(
    view: RunView, *, next_step_templates: Mapping[str, str] = NEXT_STEP_COMMANDS
) -> RunResults:
    """Return the results of a run as data for a program."""
    record, steps = view.record, view.steps
    points = read_held_out_points(record, steps)
    templates = {key: text for key, text in next_step_templates.items() if key != "results"}
    optional_fields: Json = {
        "forecast": record.forecast if view.forecast and steps else None,
        "actual": view.actual.model_dump(mode="json") if view.actual else None,
        "health": record.health,
        "rollouts": view.rollout_reasons,
        "evaluation": view.evaluation_faults,
        "wandb_url": record.wandb_url,
        "wandb_dir": view.wandb_folder if not record.wandb_url else None,
        "end_cause": record.end_cause,
        "error": record.error,
    }
    return RunResults(
        run_id=record.run_id,
        status=record.status,
        environment=record.environment,
        base_model=record.base_model,
        wandb_project=record.wandb_project,
        wandb_run_name=record.wandb_run_name,
        reward=view.summary.reward,
        held_out={name: point.percent_correct for name, point in points.items()},
        held_out_intervals={
            name: point.model_dump(include={"items", "low", "high"})
            for name, point in points.items()
            if point.items is not None
        },
        held_out_curve=view.curve,
        **summarize_last_steps(steps, view.curve),
        weights=view.weights,
        final_metrics=view.last_step,
        history=[select_key_metrics(step) for step in sample_history(steps)],
        metrics_file=str(view.run_dir.metrics),
        next_steps=view.list_next_steps(templates),
        **{key: value for key, value in optional_fields.items() if value},
    )


# Number of last steps whose rollouts make an accuracy, because one step has few prompts.
NUM_STEPS = 5


def summarize_last_steps(steps: Sequence[Step], curve: Sequence[HeldOutPoint]) -> Json:
    """Return `loss`, `accuracy` and `accuracy_source`; all are known after a step."""
    if not steps:
        return {"loss": None, "accuracy": None, "accuracy_source": None}
    losses = [step["train/loss"] for step in steps if step.get("train/loss") is not None]
    accuracy = find_newest_accuracy(curve)
    source = "held-out items"
    if accuracy is None:
        shares = [step.get("train/percent_correct") for step in steps[-NUM_STEPS:]]
        known_shares = [share for share in shares if share is not None]
        accuracy = round(statistics.fmean(known_shares), 4) if known_shares else None
        source = "rollouts of training"
    # Steps whose groups have equal rewards have no loss.
    return {
        "loss": losses[-1] if losses else 0.0,
        "accuracy": accuracy,
        "accuracy_source": source if accuracy is not None else None,
    }
