"""List the runs that were asked for, with what distinguishes them.

An address such as `/runs?env=arithmetic&q=learning_rate>0.001&sort=-held` holds the whole state of
the page. A summary reads the first and the last lines of a run's metrics only.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.base.errors import LachesisError
from lachesis.base.json_text import Json
from lachesis.config.run_fields import INFRASTRUCTURE, Section
from lachesis.reporting.mean_rewards import (
    REWARD_STEPS,
    compute_mean_reward,
    count_reward_steps,
)
from lachesis.reporting.verdict_marks import choose_mark, needs_a_look
from lachesis.runs.folder import RunDir
from lachesis.runs.held_out_results import (
    BASE_PREFIX,
    OWN_PREFIX,
    HeldOutPoint,
    find_base_result,
    find_newest_result,
)
from lachesis.runs.metrics import MetricsFile, Step
from lachesis.runs.record import RunRecord, get_attempt_duration_s
from lachesis.runs.store import read_effective_config
from lachesis.spending.budgets import TOKEN_KINDS

# Last steps of a run that are searched for a held-out result.
MAX_HELD_OUT_STEPS = 60
# Fields that differ between any two runs, or that a column of their own shows.
EXCLUDED_SETTINGS = frozenset(
    {"env.wandb_name", "env.mixture", "env.total_steps", "tinker.wandb_project"}
)
# Fields of the record that a list shows as they are.
SHOWN_FIELDS = {
    "run_id", "name", "note", "tags", "environment", "status", "wandb_run_name", "profile",
    "created_at", "total_steps", "seed", "schedule",
}  # fmt: skip
# The sections whose fields a comparison shows.
SECTIONS = ("env", "tinker", "limits")


@dataclass(frozen=True)
class RunSummary:
    """Hold what a list or a comparison shows of one run."""

    record: RunRecord
    step: int
    reward: dict[str, float | None]
    """The first and the last mean reward, each over `reward_steps` steps."""
    reward_steps: int
    held_out: HeldOutPoint | None
    """The newest held-out result."""
    held_out_before: HeldOutPoint | None
    """The held-out result of the base model."""
    duration_s: float | None
    """Seconds of all attempts together; None before the first."""
    tokens: int | None
    """Tokens so far, prefill, sampled and trained together; None before the first step."""
    cost_usd: float | None
    """US dollars so far by the price table; None where nothing is paid, or prices are unknown."""
    settings: dict[str, Any]
    """The fields of its configuration by SECTION.FIELD, and `model`."""

    def to_payload(self) -> Json:
        """Return the summary as JSON, without the settings."""
        record = self.record
        return {
            **record.model_dump(include=SHOWN_FIELDS),
            "model": record.base_model,
            "learning": record.learning,
            "evidence": record.evidence,
            "stalled": record.stall_text,
            "step": self.step,
            "reward": self.reward,
            "reward_steps": self.reward_steps,
            "held_out": self.held_out.model_dump() if self.held_out else None,
            "duration_s": self.duration_s,
        }


def summarize_run(record: RunRecord, run_dir: RunDir) -> RunSummary:
    """Return the summary of a run.

    Metrics or a configuration that cannot be read count as none, so that other runs are still
    listed; the status of the run reports the problem.
    """
    metrics = MetricsFile(run_dir.metrics)
    # A resumed run has made some steps twice; near its ends that does not matter for a summary.
    first_steps: list[Step] = []
    last_steps: list[Step] = []
    with contextlib.suppress(OSError):
        first_steps, last_steps = metrics.head(REWARD_STEPS), metrics.tail(MAX_HELD_OUT_STEPS)
    last_step = last_steps[-1] if last_steps else {}
    step = last_step.get("step", 0)
    count = count_reward_steps(step)
    reward = {}
    if last_steps:
        reward = {
            "first": compute_mean_reward(first_steps[:count]),
            "last": compute_mean_reward(last_steps[-count:]),
        }
    return RunSummary(
        record=record,
        step=step,
        reward=reward,
        reward_steps=count,
        held_out=find_newest_result(last_steps),
        held_out_before=_find_result_before(record, run_dir),
        duration_s=_compute_duration_s(record),
        tokens=_count_tokens(last_step),
        cost_usd=last_step.get("cost/total"),
        settings=_read_settings(record, run_dir),
    )


def _find_result_before(record: RunRecord, run_dir: RunDir) -> HeldOutPoint | None:
    """Return the held-out result of the base model if it is known."""
    prefix = OWN_PREFIX if record.starts_from_base else BASE_PREFIX
    with contextlib.suppress(OSError):
        line = MetricsFile(run_dir.metrics).find_first(f"{prefix}step")
        return find_base_result(record, [line or {}])
    return None


def _count_tokens(last_step: Step) -> int | None:
    counts = [last_step.get(f"tokens/{kind}_total") for kind in TOKEN_KINDS]
    known_counts = [count for count in counts if count is not None]
    if known_counts:
        return int(sum(known_counts))
    return None


def _compute_duration_s(record: RunRecord) -> float | None:
    """Return the seconds of all attempts, the present one included."""
    if record.started_at is None and not record.earlier_hours:
        return None
    attempt_s = 0.0
    if record.attempt_duration_s is not None or record.started_at is not None:
        attempt_s = get_attempt_duration_s(record)
    return round(record.earlier_hours * 3600 + attempt_s, 1)


def _read_settings(record: RunRecord, run_dir: RunDir) -> dict[str, Any]:
    try:
        config = read_effective_config(run_dir)
    except (OSError, LachesisError):
        return {}
    settings: dict[str, Any] = {"model": get_model_name(record), "profile": record.profile}
    for name in SECTIONS:
        section: Section = getattr(config, name)
        for field, value in section.model_dump().items():
            key = f"{name}.{field}"
            if key not in EXCLUDED_SETTINGS and not _is_infrastructure(section, field):
                settings[key] = value
    if config.env.mixture:
        settings["env.mixture"] = config.env.model_dump()["mixture"]
    return settings


def get_model_name(record: RunRecord) -> str:
    """Return the name of the base model; of a folder, its last part."""
    if Path(record.base_model).is_absolute():
        return Path(record.base_model).name
    return record.base_model


def _is_infrastructure(section: Section, field: str) -> bool:
    info = type(section).model_fields.get(field)
    return info is not None and INFRASTRUCTURE in info.metadata


def find_differing_settings(summaries: Sequence[RunSummary]) -> dict[str, str]:
    """Return the settings in which runs differ, by the name that a table shows.

    A setting that only some of the runs have, because they are on different environments, counts if
    those that have it differ.

    Returns:
        SECTION.FIELD by the field's name, or by SECTION.FIELD where two fields have one name.
    """
    differing = []
    for key in dict.fromkeys(key for summary in summaries for key in summary.settings):
        values = [summary.settings[key] for summary in summaries if key in summary.settings]
        if any(value != values[0] for value in values):
            differing.append(key)
    short_names = [key.rpartition(".")[2] for key in differing]
    return {
        short_name if short_names.count(short_name) == 1 else key: key
        for key, short_name in zip(differing, short_names, strict=True)
    }


ROWS_PER_PAGE = 50
# The letters of runs that are compared, in the order in which they were chosen.
LETTERS = "ABCDEFGH"
MAX_COMPARED_RUNS = len(LETTERS)
_COMPARISON = re.compile(r"([\w./]+)(>=|<=|!=|=|>|<)(.+)")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le,
    "=": operator.eq, "!=": operator.ne,
}  # fmt: skip
Summarize = Callable[[RunRecord], RunSummary]


@dataclass(frozen=True)
class RunFilter:
    """Say which runs are listed, in which order, and how."""

    text: str = ""
    """Words that a run's texts contain, and comparisons of its settings such as `group_size>8`."""
    environment: str = ""
    health: str = ""
    """A verdict, or `look` for all runs that need a look."""
    state: str = ""
    """A status, or `alive` or `ended`."""
    tag: str = ""
    sort: str = "-run"
    """What the runs are ordered by; with a minus sign the largest value comes first."""
    columns: str = ""
    """`all` shows every setting, and not only those that differ."""
    page: int = 1
    ticked: tuple[str, ...] = ()
    """The runs that are chosen for a comparison, in this order."""

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> RunFilter:
        """Return the filter that an address asks for; what it does not know is left out."""
        page = query.get("page", "1")
        ticked = [run_id for run_id in query.get("ticked", "").split(",") if run_id]
        return cls(
            text=query.get("q", "").strip(),
            environment=query.get("env", ""),
            health=query.get("health", ""),
            state=query.get("state", ""),
            tag=query.get("tag", ""),
            sort=query.get("sort", "") or "-run",
            columns=query.get("columns", ""),
            page=max(1, int(page)) if page.isdecimal() and len(page) < 6 else 1,
            ticked=tuple(dict.fromkeys(ticked))[:MAX_COMPARED_RUNS],
        )

    def list_set_filters(self) -> dict[str, str]:
        """Return the filters that leave runs out, by their name in the address."""
        values = {
            "q": self.text,
            "env": self.environment,
            "health": self.health,
            "state": self.state,
            "tag": self.tag,
        }
        return {name: value for name, value in values.items() if value}


def select_runs(
    records: Sequence[RunRecord], wanted: RunFilter, summarize: Summarize
) -> list[RunRecord]:
    """Return the runs that a filter lets through, in its order.

    Args:
        records: All runs, the newest first.
        wanted: The filter.
        summarize: Returns the summary of a run. Only comparisons of settings and an order by
            results need it, because it reads files of the run.
    """
    words, comparisons = _split_text(wanted.text)
    matching = [
        record
        for record in records
        if _matches_fields(record, wanted) and _contains_words(record, words)
    ]
    for name, symbol, value in comparisons:
        matching = [
            record
            for record in matching
            if _compare(_find_setting(summarize(record), name), symbol, value)
        ]
    return _sort_runs(matching, wanted.sort, summarize)


def _matches_fields(record: RunRecord, wanted: RunFilter) -> bool:
    environments = (record.environment, *record.additional_environments)
    if wanted.environment and wanted.environment not in environments:
        return False
    if wanted.tag and wanted.tag not in record.tags:
        return False
    if wanted.health == "look":
        if not needs_a_look(record):
            return False
    elif wanted.health and choose_mark(record).word != wanted.health:
        return False
    if wanted.state in ("alive", "ended"):
        return record.has_ended == (wanted.state == "ended")
    return wanted.state in ("", record.status)


def _split_text(text: str) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Return the words of a search, and its comparisons as name, operator and value."""
    words, comparisons = [], []
    for part in text.split():
        if match := _COMPARISON.fullmatch(part):
            comparisons.append((match[1], match[2], match[3]))
        else:
            words.append(part.casefold())
    return words, comparisons


def _contains_words(record: RunRecord, words: Sequence[str]) -> bool:
    if not words:
        return True
    texts = (
        record.run_id,
        record.name,
        record.environment,
        *record.additional_environments,
        *record.tags,
        record.note,
        record.base_model,
        record.status,
        record.learning,
        record.schedule,
    )
    text = " ".join(part for part in texts if part).casefold()
    return all(word in text for word in words)


def _find_setting(summary: RunSummary, name: str) -> Any:
    """Return a setting by its name, with or without its section; None if there is none."""
    if name in summary.settings:
        return summary.settings[name]
    for key, value in summary.settings.items():
        if key.rpartition(".")[2] == name:
            return value
    return None


def _compare(setting: Any, symbol: str, text: str) -> bool:
    """Return whether a setting compares with a text as asked; numbers compare as numbers."""
    if setting is None:
        return symbol in ("=", "!=") and (text.casefold() == "none") == (symbol == "=")
    if isinstance(setting, int | float) and not isinstance(setting, bool):
        try:
            return _OPERATORS[symbol](setting, float(text.replace(",", "")))
        except ValueError:
            return symbol == "!="
    return _OPERATORS[symbol](str(setting).casefold(), text.casefold())


def _get_sort_value(record: RunRecord, key: str, summarize: Summarize) -> Any:
    if key == "run":
        return record.created_at
    if key == "health":
        return choose_mark(record).word
    summary = summarize(record)
    if key == "reward":
        return summary.reward.get("last")
    if key == "held":
        return summary.held_out.percent_correct if summary.held_out else None
    if key == "took":
        return summary.duration_s
    if key == "tokens":
        return summary.tokens
    return _find_setting(summary, key)


def _sort_runs(records: list[RunRecord], sort: str, summarize: Summarize) -> list[RunRecord]:
    """Return the runs in order; those without a value come last, and by time the living first."""
    key, is_descending = sort.removeprefix("-"), sort.startswith("-")
    values = {record.run_id: _get_sort_value(record, key, summarize) for record in records}
    known = [record for record in records if values[record.run_id] is not None]
    unknown = [record for record in records if values[record.run_id] is None]
    # A setting may be a number in one environment and a word in another.
    are_numbers = all(isinstance(values[record.run_id], int | float) for record in known)
    known.sort(
        key=lambda record: values[record.run_id] if are_numbers else str(values[record.run_id]),
        reverse=is_descending,
    )
    if sort == "-run":
        known.sort(key=lambda record: record.has_ended)
    return known + unknown
