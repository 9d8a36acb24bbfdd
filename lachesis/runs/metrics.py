"""Store the metrics of a run: one JSON line per step in `metrics.jsonl`."""

import contextlib
import itertools
import json
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.base.files import storage_errors, write_private
from lachesis.base.json_text import Json, parse_json_lines
from lachesis.base.reward_values import is_score
from lachesis.runs.held_out_results import is_evaluation_key

log = logging.getLogger(__name__)

Step = dict[str, Any]
# Number of evaluations that failed since the previous line; it stays with its line.
FAILED_KEY = "eval/failed"
# The metrics that a report shows; `metrics.jsonl` has all of them.
KEY_METRICS = ("reward/mean", "train/percent_correct", "train/loss",
               "entropy/sampling", "logprobs/gap", "staleness/mean", "length/mean",
               "weights/change",
               "batch/zero_signal_share", "rollouts/invalid", "rollouts/dropped",
               "tokens_per_second/sampled",
               "tokens_per_second/trained", "time/step", "time/rollouts", "time/forward_backward",
               "cost/total")  # fmt: skip
_NUMBER_TYPES = frozenset({int, float})
# Typical size of a line, which has some sixty numbers; longer lines only cost another read.
ASSUMED_LINE_BYTES = 3000


class MetricsFile:
    """Read and append the lines of `metrics.jsonl`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, metrics: dict[str, float]) -> None:
        """Append the metrics of a step.

        Raises:
            StorageError: The file cannot be written.
        """
        line = _to_json_line({"step": step, "time": round(time.time(), 3), **metrics})
        with storage_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(("" if self._ends_with_line_feed() else "\n") + line)

    def add_evaluation(self, metrics: dict[str, float]) -> bool:
        """Add a held-out result to the last step, after which no line follows.

        A result that the line has already moves to the previous line, and so on. The first line
        keeps the result of step 0, from which a curve begins; if every line has a result, that of
        the earliest later step is dropped. The changed lines are appended, all of them or none:
        readers use the last line of a step, and drop later steps before it.

        Returns:
            Whether there was a step.

        Raises:
            StorageError: The file cannot be written.
        """
        steps = self.read()
        if not steps:
            return False
        with storage_errors(self.path):
            content = self.path.read_text(encoding="utf-8", errors="replace")
        gap = "" if content.endswith("\n") else "\n"
        added = "".join(map(_to_json_line, _add_evaluation(steps, metrics)))
        write_private(self.path, content + gap + added)
        return True

    def _ends_with_line_feed(self) -> bool:
        """Return whether the last line is complete; a kill may have cut it."""
        size = self.path.stat().st_size
        if size == 0 or not self.path.is_file():
            return True
        with self.path.open("rb") as file:
            file.seek(size - 1)
            return file.read() == b"\n"

    def read(self) -> list[Step]:
        """Return the steps in order, without those that a resumed run has made again."""
        if self.path.is_file():
            return _parse_steps(self.path.read_bytes())
        return []

    def tail(self, count: int) -> list[Step]:
        """Return at least the last `count` steps without reading a long file."""
        num_bytes = count * ASSUMED_LINE_BYTES
        while True:
            try:
                with self.path.open("rb") as file:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(0, size - num_bytes))
                    content = file.read()
            except FileNotFoundError:
                return []
            if len(content) >= size:
                return _parse_steps(content)
            steps = _parse_steps(content[content.find(b"\n") + 1 :])
            if len(steps) >= count:
                return steps
            num_bytes *= 2  # Lines with several environments and evaluations are longer.

    def read_from(self, position: int) -> tuple[list[Step], int]:
        """Return the steps in the complete lines after `position` (bytes), and the position after
        them.

        A file that is shorter was rewritten: its size is returned without steps.
        """
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(min(position, size))
                content = file.read()
        except FileNotFoundError:
            return [], 0
        complete_lines = content[: content.rfind(b"\n") + 1]
        return _parse_steps(complete_lines), min(position, size) + len(complete_lines)

    def find_first(self, name: str) -> Step | None:
        """Return the first line that has this metric, without parsing the others."""
        return self._find_line(name, lambda content, mark: content.find(mark))

    def find_last(self, name: str) -> Step | None:
        """Return the last line that has this metric, without parsing the others."""
        return self._find_line(name, lambda content, mark: content.rfind(mark))

    def _find_line(self, name: str, search: Callable[[mmap.mmap, bytes], int]) -> Step | None:
        """Return the line that a search finds, without parsing the others."""
        mark = f"{json.dumps(name)}:".encode()
        # ValueError: an empty file has no content to map.
        with (
            contextlib.suppress(FileNotFoundError, ValueError),
            self.path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            place = search(content, mark)
            if place >= 0:
                content.seek(content.rfind(b"\n", 0, place) + 1)
                return next(iter(_parse_steps(content.readline())), None)
        return None

    def head(self, count: int) -> list[Step]:
        """Return at most the first `count` lines, as long as none of their steps was made again."""
        try:
            with self.path.open("rb") as file:
                content = b"".join(itertools.islice(file, count))
        except FileNotFoundError:
            return []
        return _parse_steps(content)


class MetricsReader:
    """Read the steps of a file again and again; only the lines that were added are parsed.

    Several threads may share it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._state: tuple[int, int] | None = None
        self._position = 0
        self._steps: list[Step] = []

    def read(self) -> list[Step]:
        """Return the steps in order, without those that a resumed run has made again.

        Raises:
            OSError: The file cannot be read.
        """
        with self._lock:
            return self._read()

    def _read(self) -> list[Step]:
        """Return the steps; only lines that were added since the last call are parsed."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._state, self._position, self._steps = None, 0, []
            return []
        state = (status.st_mtime_ns, status.st_size)
        if state != self._state:
            # A file that is shorter than before was written anew.
            if self._position > status.st_size:
                self._position, self._steps = 0, []
            new_steps, self._position = MetricsFile(self.path).read_from(self._position)
            # A new list: that of the last call may be in use.
            self._steps = join_steps(self._steps, new_steps)
            self._state = state
        return self._steps


def _to_json_line(line: Mapping[str, Any]) -> str:
    return json.dumps(line) + "\n"


def _add_evaluation(steps: Sequence[Step], metrics: Mapping[str, float]) -> list[Step]:
    """Return the lines that change when the last one gets another result; see `add_evaluation`."""
    moving_metrics, changed_lines = dict(metrics), []
    last = dict(steps[-1])
    if failed := moving_metrics.pop(FAILED_KEY, 0):
        last[FAILED_KEY] = (last.get(FAILED_KEY) or 0) + failed
    for line in (last, *reversed(steps[:-1])):
        present_metrics = {
            key: line[key] for key in line if is_evaluation_key(key) and key != FAILED_KEY
        }
        if present_metrics.keys().isdisjoint(moving_metrics):
            changed_lines.append({**line, **moving_metrics})
            return changed_lines[::-1]
        if len(changed_lines) == len(steps) - 1 > 0 and _is_of_step_0(present_metrics):
            break
        changed_lines.append(
            {**{key: line[key] for key in line if key not in present_metrics}, **moving_metrics}
        )
        moving_metrics = present_metrics
    log.warning("no line of the metrics is left for the evaluation %s", json.dumps(moving_metrics))
    return changed_lines[::-1]


def _is_of_step_0(evaluation: Mapping[str, Any]) -> bool:
    return any(
        value == 0 for key, value in evaluation.items() if key.endswith(("eval/step", "base/step"))
    )


def _parse_steps(content: bytes) -> list[Step]:
    return join_steps([], filter(None, map(_parse_step, parse_json_lines(content))))


def join_steps(steps: Sequence[Step], later_steps: Iterable[Step]) -> list[Step]:
    """Return steps and those of later lines, without those that a later line has made again."""
    joined = list(steps)
    for step in later_steps:
        while joined and joined[-1]["step"] >= step["step"]:
            joined.pop()
        joined.append(step)
    return joined


def _parse_step(line: Json) -> Step | None:
    """Return the step and the numbers of a line, or None if it has no step.

    A value that is not a finite number, such as a diverged loss, becomes None.
    """
    if type(line.get("step")) is not int or not is_score(line["step"]):
        return None
    if _has_only_numbers(line):
        return line
    return {
        key: value if isinstance(value, int | float) and is_score(value) else None
        for key, value in line.items()
    }


def _has_only_numbers(line: Json) -> bool:
    """Return whether all values are finite numbers, as they nearly always are.

    A long run has more than a hundred thousand of them, and a look at each would take most of the
    time of reading its file.
    """
    values = line.values()
    try:
        # A sum is finite only if all of its parts are.
        are_finite = _NUMBER_TYPES.issuperset(map(type, values)) and math.isfinite(sum(values))
        return are_finite and is_score(max(values)) and is_score(min(values))
    except OverflowError:
        return False


def sample_history(steps: list[Step], max_steps: int = 10) -> list[Step]:
    """Return at most `max_steps` steps, evenly spread, including the first and the last."""
    if len(steps) <= max_steps:
        return steps
    return [steps[round(index * (len(steps) - 1) / (max_steps - 1))] for index in range(max_steps)]


def select_key_metrics(step: Step) -> Step:
    """Return the step with its time and the metrics that a report shows."""
    return {name: step[name] for name in ("step", "time", *KEY_METRICS) if name in step}
