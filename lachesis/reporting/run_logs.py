"""Return the last lines of a service's log, or its lines that contain a search text."""

import re
from dataclasses import dataclass
from pathlib import Path

from lachesis.base.errors import ConfigError, shorten
from lachesis.base.files import read_last_lines
from lachesis.base.secrets import redact
from lachesis.reporting.run_view import find_log_files
from lachesis.runs.folder import RunDir, shorten_service_name
from lachesis.runs.record import RunRecord

TAIL_LINES, MAX_LINES = 12, 200
# A search reads the end of a long log only.
MAX_SEARCHED_BYTES = 20_000_000
_ERROR = re.compile(r"\b(ERROR|CRITICAL|[A-Z]\w*(?:Error|Exception)\b)|^Traceback")


@dataclass(frozen=True)
class LogLine:
    """Hold one line of a log."""

    text: str
    is_error: bool


@dataclass(frozen=True)
class LogView:
    """Hold a part of a log."""

    name: str
    text: str
    """What was searched for, or nothing."""
    lines: list[LogLine]
    description: str


def find_log(record: RunRecord, run_dir: RunDir, name: str) -> Path:
    """Return the file of a log.

    Raises:
        ConfigError: The run has no log of this name.
    """
    files = find_log_files(record, run_dir)
    if name not in files:
        raise ConfigError(
            f"run {record.run_id} has no log {shorten(repr(name), 60)}; it has {', '.join(files)}"
        )
    # The record's paths may be those of another machine; the run's folder has the logs.
    return run_dir.logs / Path(files[name]).name


def choose_log(record: RunRecord) -> str:
    """Return the log that tells most: that of the service that failed, stands still or raises."""
    stalled_part = (record.stall or {}).get("part", "")
    if record.failed_service:
        return shorten_service_name(record.failed_service)
    if stalled_part in record.services:
        return shorten_service_name(stalled_part)
    if "no usable score" in (record.evidence or ""):
        environments = [name for name in record.services if name.startswith("environment")]
        return shorten_service_name(environments[0] if environments else "environment")
    return "trainer"


def view_log(
    record: RunRecord, run_dir: RunDir, name: str, *, text: str = "", max_lines: int = TAIL_LINES
) -> LogView:
    """Return the last lines of a log, or the last lines that contain a string.

    Raises:
        ConfigError: The run has no log of this name.
    """
    file = find_log(record, run_dir, name)
    if text:
        matching = _search(file, text)
        shown = matching[-max_lines:]
        description = f"{len(shown)} of {len(matching):,} lines with this text"
    else:
        shown = [line for line in read_last_lines(file, max_lines).splitlines() if line.strip()]
        description = f"the last {len(shown)} lines" if shown else "nothing was written yet"
    lines = [redact(line) for line in shown]
    return LogView(name, text, [LogLine(line, _is_error(line)) for line in lines], description)


def _search(file: Path, text: str) -> list[str]:
    """Return the lines near the end of a log that contain a text."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            # Whoever searches a log looks for what went wrong, which is near its end.
            stream.seek(max(0, size - MAX_SEARCHED_BYTES))
            content = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lowered_text = text.casefold()
    return [line for line in content.splitlines() if lowered_text in line.casefold()]


def _is_error(line: str) -> bool:
    return _ERROR.search(line) is not None
