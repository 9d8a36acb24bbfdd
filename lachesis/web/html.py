"""Write the charts of a run as PNG files, and gather the tables of its report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lachesis.base.files import storage_errors
from lachesis.base.json_text import Json
from lachesis.reporting.charts import draw_learning, draw_reward, draw_timing
from lachesis.reporting.run_schemas import RunResults
from lachesis.runs.folder import RunDir
from lachesis.runs.metrics import MetricsFile, Step
from lachesis.runs.provenance import read_provenance
from lachesis.runs.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHARTS: dict[str, Callable[[Sequence[Step], RunResults], Figure]] = {
    "reward": draw_reward,
    "learning": draw_learning,
    "timing": draw_timing,
}


def write_charts(run_dir: RunDir, results: RunResults, target: Path) -> list[Path]:
    """Write one PNG per chart to a folder, and return the files.

    Raises:
        StorageError: A file cannot be written.
    """
    steps = MetricsFile(run_dir.metrics).read()
    files = []
    with storage_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        for name, draw in CHARTS.items() if steps else ():
            files.append(target / f"{name}.png")
            draw(steps, results).savefig(files[-1], dpi=120)
    return files


def list_provenance(record: RunRecord, run_dir: RunDir) -> list[tuple[str, Any]]:
    """Return what the run is made of: command, code, model, data, packages and machine."""
    provenance = read_provenance(run_dir)
    if provenance is None:
        return []
    machine = provenance["machine"]
    sources = provenance["environments"].items()
    model = provenance["model"]
    return [
        ("command", provenance["command"]),
        ("seed", record.seed),
        ("Lachesis", _describe_version(provenance["lachesis"])),
        *((f"code of {name}", _describe_version(source)) for name, source in sources),
        ("model", model.get("revision") or _get_file_name(model.get("folder"))),
        *((f"data {_get_file_name(file)}", digest) for file, digest in provenance["data"].items()),
        ("packages", ", ".join(" ".join(item) for item in provenance["packages"].items())),
        ("Python", machine["python"]),
        (
            "machine",
            f"{machine['cpu_cores']} cores, {machine['memory_gb']} GB, {machine['system']}",
        ),
        ("GPUs", ", ".join(machine["gpus"])),
    ]


def _get_file_name(path: str | None) -> str:
    """Return the last part of a path: where a file lies on a machine is nobody's concern."""
    return Path(path).name if path else ""


def _describe_version(source: Json) -> str:
    """Return the file or the version, and the git commit with whether it was changed."""
    place = _get_file_name(source.get("file")) or str(source.get("version"))
    if "commit" not in source:
        return place
    changed = ", with changes that are not committed" if source["changed"] else ""
    return f"{place}, commit {source['commit'][:12]}{changed}"


def list_held_out_results(results: RunResults) -> list[list[Any]]:
    """Return a row per held-out result: step, share, items, and interval."""
    rows: list[list[Any]] = []
    for point in results.held_out_curve:
        interval = ""
        if point.low is not None and point.high is not None:
            interval = f"{point.low:.3f} to {point.high:.3f}"
        rows.append([point.step, f"{point.percent_correct:.3f}", point.items, interval])
    return rows


def list_forecast(results: RunResults) -> list[list[Any]]:
    """Return a row per quantity of the forecast, beside what the run has taken."""
    forecast, actual = results.forecast or {}, results.actual or {}
    quantities = {
        "tokens": ("tokens", 1, sum(actual.get("tokens", {}).values())),
        "hours": ("minutes of training", 60, actual.get("training_hours")),
        "cost_usd": ("US dollars", 1, actual.get("cost_usd")),
    }
    rows = []
    for key, (title, factor, actual_value) in quantities.items():
        if not (forecast_range := forecast.get(key)):
            continue
        actual_text = "" if actual_value is None else _format_number(actual_value * factor)
        low = _format_number(forecast_range["low"] * factor)
        high = _format_number(forecast_range["high"] * factor)
        rows.append([title, f"{low} to {high}", actual_text, actual.get("ratio", {}).get(key, "")])
    return rows


def _format_number(number: float) -> str:
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}"
