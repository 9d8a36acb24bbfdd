"""Keep the monitor's memory between two ticks in the run's `monitor.json`."""

import contextlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lachesis.base.errors import StorageError
from lachesis.base.files import write_private
from lachesis.base.timestamps import iso_to_unix_s
from lachesis.monitor.reward_trend import Trend
from lachesis.runs.folder import RunDir
from lachesis.runs.host_clock import is_same_boot, read_boot_id
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import RunRecord


class MonitorMemory(BaseModel):
    """What the monitor remembers of one run during one attempt."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    flow_run_id: str | None = None
    attempt: int = 1
    """The attempt that this memory belongs to. Another flow run or attempt starts with an empty
    memory.
    """
    silent_since: dict[str, float] = {}
    """Since when each silent service has not answered, as a Unix time."""
    reported_stall: str | None = None
    """The part of the stall that was already reported."""
    reported_health: str | None = None
    """The word of the judgement that was already reported."""
    trend: Trend = Trend()
    """The sums over the run's steps."""
    stopping_since: float | None = None
    """Monotonic time since which the run's flow waits to be stopped."""
    clock_offset_s: float | None = None
    """Seconds between the wall clock and the monotonic clock at the previous tick."""
    clock_changed_at: float | None = None
    """Monotonic time at which that difference was seen to change."""
    boot_id: str | None = None
    """The boot of the host that `stopping_since`, `clock_offset_s` and `clock_changed_at` belong
    to.
    """
    artifacts: dict[str, str] = {}
    published_at: float = 0.0


def load_memory(run_dir: RunDir, record: RunRecord | None = None) -> MonitorMemory:
    """Return the previous tick's memory, empty if `record` has another attempt."""
    boot_id = read_boot_id()
    try:
        memory = MonitorMemory.model_validate_json(_get_memory_path(run_dir).read_bytes())
    except (OSError, ValidationError):
        memory = MonitorMemory(boot_id=boot_id)
    # After a restart of the host its monotonic clock begins again.
    if memory.boot_id is None or not is_same_boot(memory.boot_id, boot_id):
        memory.stopping_since = memory.clock_offset_s = memory.clock_changed_at = None
        memory.boot_id = boot_id
    if record is None:
        return memory
    current_attempt = (record.flow_run_id, record.attempt)
    if (memory.flow_run_id, memory.attempt) == current_attempt:
        return memory
    return MonitorMemory(flow_run_id=record.flow_run_id, attempt=record.attempt, boot_id=boot_id)


def save_memory(run_dir: RunDir, memory: MonitorMemory) -> None:
    """Write the memory. If the disk refuses it, the next tick only has to read more."""
    with contextlib.suppress(StorageError):
        write_private(_get_memory_path(run_dir), memory.model_dump_json())


def update_trend(trend: Trend, run_dir: RunDir, record: RunRecord) -> Trend:
    """Return the sums including the steps that were made since the previous tick.

    Only new lines are read. If an earlier step was made again after a resume, all lines are read
    again, so that the replaced steps are no longer counted.
    """
    metrics, since = (
        MetricsFile(run_dir.metrics),
        iso_to_unix_s(record.started_at or record.created_at),
    )
    try:
        steps, position = metrics.read_from(trend.position)
        if position < trend.position or (steps and steps[0]["step"] <= trend.last_step):
            trend = Trend()
            steps, position = metrics.read_from(0)
    except OSError:  # the observation reports files that cannot be read
        return trend
    trend.add(steps, since=since)
    trend.position = position
    return trend


def _get_memory_path(run_dir: RunDir) -> Path:
    return run_dir.path / "monitor.json"
