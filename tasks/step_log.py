"""Log how training proceeds on the page of the run.

Prefect's newer page shows the first fifty lines of a run by itself and no more, so the lines become
rarer: at steps 1, 2, 5, 10, 20, 50 and so on, and after a pause that grows from half a minute.
"""

from __future__ import annotations

import logging
import time

from lachesis.base.json_text import Json
from lachesis.runs.folder import RunDir
from lachesis.runs.held_out_results import build_held_out_curve, describe_point
from lachesis.runs.metrics import MetricsFile

log = logging.getLogger("lachesis.flow")
MAX_LINES = 30
FIRST_PAUSE_S = 30.0
# After so many lines the pause is twice as long.
LINES_PER_PAUSE = 6
TAIL_STEPS = 60


class StepLog:
    """Log the steps of one attempt of a run."""

    def __init__(self, folder: RunDir, total_steps: int) -> None:
        """Begin after the steps that earlier attempts have made."""
        self._metrics, self.total_steps = MetricsFile(folder.metrics), total_steps
        self._last_step = max((int(line["step"]) for line in self._metrics.tail(1)), default=0)
        self._num_lines, self._logged_step = 0, self._last_step
        self._logged_at = time.monotonic()

    def update(self) -> bool:
        """Log the new steps that are worth a line, and return whether there were any."""
        lines = self._metrics.tail(TAIL_STEPS)
        num_lines_before = self._num_lines
        for index, line in enumerate(lines):
            if line["step"] <= self._last_step:
                continue
            self._last_step = int(line["step"])
            if self._is_worth_a_line(self._last_step):
                self._log_step(lines[: index + 1])
        return self._num_lines > num_lines_before

    def finish(self) -> None:
        """Log the last step if it was not logged."""
        lines = self._metrics.tail(TAIL_STEPS)
        if lines and int(lines[-1]["step"]) > self._logged_step:
            self._log_step(lines)

    def _is_worth_a_line(self, step: int) -> bool:
        if self._num_lines >= MAX_LINES:
            return False
        pause_s = FIRST_PAUSE_S * 2 ** (self._num_lines // LINES_PER_PAUSE)
        return is_milestone(step) or time.monotonic() - self._logged_at >= pause_s

    def _log_step(self, lines: list[Json]) -> None:
        """Log the last of these lines of metrics."""
        self._num_lines += 1
        self._logged_at, self._logged_step = time.monotonic(), int(lines[-1]["step"])
        log.info("%s", describe_step(lines, self.total_steps))


def is_milestone(step: int) -> bool:
    """Return whether a step is 1, 2 or 5 times a power of ten."""
    return str(step).rstrip("0") in ("1", "2", "5")


def describe_step(lines: list[Json], total_steps: int) -> str:
    """Describe the last of these lines of metrics, with the newest held-out result."""
    line = lines[-1]
    parts = [f"step {line['step']} of {total_steps}"]
    if line.get("reward/mean") is not None:
        parts.append(f"reward {line['reward/mean']:.3f}")
    if points := build_held_out_curve(lines):
        parts.append(f"held out {describe_point(points[-1])} at step {points[-1].step}")
    if line.get("time/step") is not None:
        parts.append(f"{line['time/step']:.1f} s per step")
    tokens = sum(
        line.get(f"tokens/{kind}_total") or 0 for kind in ("prefill", "sampled", "trained")
    )
    parts.append(f"{tokens:,.0f} tokens so far")
    return ", ".join(parts)
