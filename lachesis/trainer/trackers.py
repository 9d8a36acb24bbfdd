"""Send the metrics of a run to experiment trackers: W&B, TensorBoard and Trackio.

A tracker has a thread of its own, so that a slow start or a lost connection never delays training.
What it shows is a copy: `metrics.jsonl` has all metrics, also when a tracker has failed.
"""

import abc
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.config.run_config import RunConfig

log = logging.getLogger(__name__)
# How long to wait for W&B before a run is logged offline, and for a tracker to send the rest.
INIT_TIMEOUT_S, CLOSE_TIMEOUT_S = 30.0, 20.0
Metrics = Mapping[str, float]


class Tracker(abc.ABC):
    """Log metrics from a thread; subclasses say how a tracker is opened, written and closed."""

    title = "a tracker"

    def __init__(self) -> None:
        self.url: str | None = None
        self.error: str | None = None
        self._queue: queue.SimpleQueue[tuple[int, Metrics] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=self.title, daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Metrics) -> None:
        """Queue the metrics of a step; they are dropped if logging has stopped."""
        if self._thread.is_alive():
            self._queue.put((step, metrics))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send the queued metrics, for at most `timeout_s` seconds."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    @abc.abstractmethod
    def open_tracker(self) -> None:
        """Open the tracker; called in the thread."""

    @abc.abstractmethod
    def write_metrics(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of one step."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Send pending values and close the tracker."""

    def _run(self) -> None:
        """Open the tracker, write each queued line, and close it; an error ends only this copy."""
        try:
            self.open_tracker()
            for step, metrics in iter(self._queue.get, None):
                self.write_metrics(step, metrics)
            self.finish()
        except Exception as error:  # The original is metrics.jsonl.
            self.error = (
                f"{self.title} logging stopped ({type(error).__name__}: {error}); metrics.jsonl is "
                "still written"
            )
            log.warning(self.error)


class WandbTracker(Tracker):
    """Log to W&B: online with WANDB_API_KEY, else offline into the run's folder.

    If W&B does not respond, the run is logged offline too. The entity is W&B's own default for the
    key.
    """

    title = "W&B"

    def __init__(
        self, folder: Path, *, project: str, group: str | None, name: str, config: dict[str, Any]
    ) -> None:
        self._folder = folder
        self._settings: dict[str, Any] = {
            "project": project,
            "group": group,
            "name": name,
            "config": config,
        }
        super().__init__()

    def open_tracker(self) -> None:
        """Start a W&B run."""
        self._run_handle = self._start_run()
        self.url = getattr(self._run_handle, "url", None)
        # Held-out results are plotted at the step of the weights they were made with.
        self._run_handle.define_metric("eval/*", step_metric="eval/step")

    def write_metrics(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of one step."""
        self._run_handle.log(metrics, step=step)

    def finish(self) -> None:
        """Send pending values."""
        self._run_handle.finish()

    def _start_run(self) -> Any:
        """Start a W&B run: online with a key if W&B responds, else offline."""
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or (
            "online" if os.environ.get("WANDB_API_KEY") else "offline"
        )
        run_options: dict[str, Any] = {**self._settings, "dir": str(self._folder)}
        # A resumed run continues the same W&B run. Offline, W&B refuses that after a failed attempt
        # online.
        resume_options: dict[str, Any] = (
            {"id": self._folder.name, "resume": "allow"} if mode == "online" else {}
        )
        try:
            return wandb.init(
                mode=mode, settings=_make_quiet_settings(), **resume_options, **run_options
            )
        except wandb.errors.Error as error:  # W&B did not respond or rejected the key.
            self.error = (
                f"W&B cannot be used ({str(error).splitlines()[0]}); the run is logged offline, "
                f"and `wandb sync` uploads it"
            )
            log.warning(self.error)
            return wandb.init(mode="offline", settings=_make_quiet_settings(), **run_options)


def _make_quiet_settings() -> Any:
    """Return new settings for one call, because W&B writes into them."""
    import wandb

    return wandb.Settings(silent=True, init_timeout=INIT_TIMEOUT_S)


class TensorBoardTracker(Tracker):
    """Write event files into the run's folder, which `tensorboard --logdir` shows.

    A resumed run writes a further file from its checkpoint on; TensorBoard shows the newest value
    of a step.
    """

    title = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        super().__init__()

    def open_tracker(self) -> None:
        """Open an event file of TensorBoard."""
        # It needs no PyTorch, which the trainer does without.
        from tensorboardX import SummaryWriter

        # A file is named after the second; a run that is resumed in the same one needs another.
        suffix = f".{time.time_ns()}"
        self._writer = SummaryWriter(str(self._folder), filename_suffix=suffix)

    def write_metrics(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of one step; held-out results at the step of their weights."""
        for name, value in metrics.items():
            is_held_out = name.startswith("eval/") and "eval/step" in metrics
            at = int(metrics["eval/step"]) if is_held_out else step
            self._writer.add_scalar(name, value, at)
        # Whoever watches a run wants to see its newest step.
        self._writer.flush()

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()


class TrackioTracker(Tracker):
    """Log to Trackio's database on this machine, which `trackio show` shows.

    It is `$TRACKIO_DIR`, else a folder in the cache of Hugging Face. A resumed run continues the
    same run of Trackio.
    """

    title = "Trackio"

    def __init__(self, *, project: str, name: str, config: dict[str, Any]) -> None:
        self._settings: dict[str, Any] = {"project": project, "name": name, "config": config}
        super().__init__()

    def open_tracker(self) -> None:
        """Start a run of Trackio."""
        import trackio

        self._trackio: Any = trackio
        trackio.init(resume="allow", embed=False, **self._settings)

    def write_metrics(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of one step."""
        self._trackio.log(dict(metrics), step=step)

    def finish(self) -> None:
        """Send pending values."""
        self._trackio.finish()


class Trackers:
    """Log to all trackers of a run."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = trackers
        self.wandb = next((item for item in trackers if isinstance(item, WandbTracker)), None)

    def log(self, step: int, metrics: Metrics) -> None:
        """Queue the metrics of a step for each tracker."""
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        """Let each tracker send its remaining metrics."""
        for tracker in self.trackers:
            tracker.close()


def create_trackers(config: RunConfig, run_folder: Path) -> Trackers:
    """Open the trackers that a configuration names."""
    name = f"{config.environment}-{run_folder.name}"
    project, values = config.tinker.wandb_project, config.model_dump(mode="json")
    makers: dict[str, Callable[[], Tracker]] = {
        "wandb": lambda: WandbTracker(
            run_folder, project=project, group=config.tinker.wandb_group, name=name, config=values
        ),
        "tensorboard": lambda: TensorBoardTracker(run_folder),
        "trackio": lambda: TrackioTracker(project=project, name=name, config=values),
    }
    return Trackers([makers[tracker]() for tracker in config.tinker.tracker_names])
