"""Gather what the page of a run shows: verdict, facts, curves, settings, attempts and services."""

from __future__ import annotations

from dataclasses import dataclass

from lachesis.base.errors import LachesisError
from lachesis.base.formatting import format_duration, shorten_count
from lachesis.base.json_text import Json
from lachesis.base.timestamps import seconds_between
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config.run_config import RunConfig
from lachesis.operations.runs import get_run_url
from lachesis.reporting.next_steps import NEXT_STEP_COMMANDS, list_next_steps, make_repeat_command
from lachesis.reporting.run_cache import RunCache
from lachesis.reporting.run_headline import RunVerdict, Trouble, describe_trouble, describe_verdict
from lachesis.reporting.run_list import RunSummary, get_model_name
from lachesis.reporting.run_settings import SettingRow, list_settings
from lachesis.reporting.run_view import estimate_eta_s
from lachesis.runs.folder import RunDir, shorten_service_name
from lachesis.runs.held_out_results import HeldOutPoint, build_held_out_curve
from lachesis.runs.metrics import Step
from lachesis.runs.provenance import read_provenance
from lachesis.runs.record import PastAttempt, RunRecord, describe_attempt, describe_service_state
from lachesis.runs.store import read_effective_config
from lachesis.spending.budgets import BudgetUsage, compute_budget_usage, read_spent_file
from lachesis.web.charts import ChosenCharts, choose_charts
from lachesis.web.wording import format_decimal


@dataclass(frozen=True)
class Fact:
    """Hold one line of the facts beside the verdict."""

    name: str
    value: str
    link: str = ""


@dataclass(frozen=True)
class MeterFact:
    """Hold a budget: what is used of it, and its end."""

    name: str
    text: str
    used: float
    limit: float


@dataclass(frozen=True)
class Amount:
    """Hold a part of a whole, for a bar and its legend."""

    name: str
    value: float
    text: str


@dataclass(frozen=True)
class CheckpointRow:
    """Hold one checkpoint that is kept."""

    step: int
    is_final: bool
    reward: float | None
    """Mean reward of the steps since the checkpoint before it."""
    held_out: HeldOutPoint | None


@dataclass(frozen=True)
class ServiceRow:
    """Hold a service of the run and the name of its log."""

    name: str
    log: str
    state: str
    is_alarming: bool


@dataclass(frozen=True)
class RunPage:
    """Hold what the page of one run shows."""

    record: RunRecord
    summary: RunSummary
    verdict: RunVerdict
    next_steps: list[str]
    facts: list[list[Fact]]
    """The facts in groups."""
    meters: list[MeterFact]
    ends_in: str
    trouble: Trouble | None
    """What shows why it needs a look, if it needs one."""
    charts: ChosenCharts
    checkpoints: list[CheckpointRow]
    seconds: list[Amount]
    tokens: list[Amount]
    forecast: Json | None
    settings: list[SettingRow]
    command: str
    """Starts the same run again; one line per option."""
    started_by: str
    """The command line that has started it, or nothing."""
    attempts: list[PastAttempt]
    """All attempts, the present one last; with one alone there is nothing to tell."""
    services: list[ServiceRow]


def build_run_page(cache: RunCache, run_id: str) -> RunPage:
    """Return the page of a run.

    Raises:
        UnknownRunError: There is no such run.
        StorageError: Its record is damaged.
    """
    record = cache.load_record(run_id)
    run_dir, steps = cache.store.dir(run_id), cache.read_steps(run_id)
    return make_run_page(record, run_dir, steps, cache.summarize(record))


def make_run_page(
    record: RunRecord, run_dir: RunDir, steps: list[Step], summary: RunSummary
) -> RunPage:
    """Return the page of a run of which all this was read."""
    config = read_config(run_dir)
    curve = build_held_out_curve(steps)
    last_step = steps[-1] if steps else {}
    usage = compute_budget_usage(record, last_step, saved=read_spent_file(run_dir.spent))
    verdict = describe_verdict(record, summary.step, summary.reward, curve)
    charts = choose_charts(steps)
    group_size = config.env.group_size if config else 0
    return RunPage(
        record=record,
        summary=summary,
        verdict=verdict,
        next_steps=list_next_steps(record, run_dir, NEXT_STEP_COMMANDS),
        facts=[
            *_list_facts(record, summary, config, usage),
            *([forecast] if (forecast := _list_forecast(record)) else []),
            *([links] if (links := _list_links(record, run_dir)) else []),
        ],
        meters=_list_meters(record, summary, config, usage),
        ends_in=_describe_end(record, steps),
        trouble=describe_trouble(record, verdict, charts.small, steps, group_size),
        charts=charts,
        checkpoints=_list_checkpoints(record, run_dir, steps, curve),
        seconds=_split_seconds(record, summary, steps),
        tokens=_split_tokens(last_step),
        forecast=record.forecast,
        settings=list_settings(record, config) if config else [],
        command=make_repeat_command(record),
        started_by=str((read_provenance(run_dir) or {}).get("command") or ""),
        attempts=list_attempts(record),
        services=list_services(record, run_dir),
    )


def read_config(run_dir: RunDir) -> RunConfig | None:
    """Return the configuration of a run, or None if it cannot be read."""
    try:
        return read_effective_config(run_dir)
    except (LachesisError, OSError):
        return None


def list_attempts(record: RunRecord) -> list[PastAttempt]:
    """Return all attempts of a run, the present one last."""
    return [*record.past_attempts, describe_attempt(record)]


def _list_facts(
    record: RunRecord, summary: RunSummary, config: RunConfig | None, usage: BudgetUsage
) -> list[list[Fact]]:
    # A living run has meters in place of what it has made.
    made = [Fact("Attempt", str(record.attempt))] if record.attempt > 1 else []
    if record.has_ended:
        made += [
            Fact("Steps", f"{summary.step:,} of {record.total_steps:,}"),
            Fact(
                "Took", "–" if summary.duration_s is None else format_duration(summary.duration_s)
            ),
            Fact("Tokens", f"{usage.tokens:,.0f}"),
            Fact("Cost", _describe_cost(record, usage)),
        ]
    settings = [Fact("Environment", record.environment), Fact("Model", get_model_name(record))]
    if config is not None:
        groups = config.env.batch_size // config.env.group_size
        rate = format_decimal(config.tinker.learning_rate)
        settings += [
            Fact("Rollouts a step", f"{groups} groups of {config.env.group_size}"),
            Fact("Learning rate", f"{rate}, {config.tinker.learning_rate_schedule}"),
            Fact("Seed", str(record.seed)),
        ]
    if record.forked_from:
        settings.append(Fact("Started from", record.forked_from))
    if record.schedule:
        settings.append(Fact("Schedule", record.schedule))
    return [group for group in (made, settings) if group]


def _list_forecast(record: RunRecord) -> list[Fact]:
    """Return what a validation of the same code forecast for all steps."""
    forecast = record.forecast or {}
    facts = []
    if tokens := forecast.get("tokens"):
        span = f"{shorten_count(tokens['low'])} to {shorten_count(tokens['high'])}"
        facts.append(Fact("Forecast of tokens", span))
    if hours := forecast.get("hours"):
        spans = [format_duration(hours[end] * 3600) for end in ("low", "high")]
        facts.append(Fact("Forecast of training", " to ".join(spans)))
    if cost := forecast.get("cost_usd"):
        facts.append(Fact("Forecast of cost", f"${cost['low']:,.2f} to ${cost['high']:,.2f}"))
    return facts


def _list_links(record: RunRecord, run_dir: RunDir) -> list[Fact]:
    links = []
    if url := get_run_url(record):
        links.append(Fact("Prefect", f"flow run {(record.flow_run_id or '')[:8]}", url))
    if record.wandb_url:
        links.append(Fact("W&B", record.wandb_run_name, record.wandb_url))
    elif any((run_dir.path / "wandb").glob("offline-run-*")):
        links.append(Fact("W&B", "offline, not sent"))
    return links


def _describe_cost(record: RunRecord, usage: BudgetUsage) -> str:
    if usage.cost_usd is not None:
        return f"${usage.cost_usd:,.2f}"
    return f"none, profile {record.profile}" if record.profile == "embedded" else "not known"


def _list_meters(
    record: RunRecord, summary: RunSummary, config: RunConfig | None, usage: BudgetUsage
) -> list[MeterFact]:
    """Return the steps of a living run, and each budget, as parts of their limits."""
    meters = []
    if not record.has_ended:
        text = f"{summary.step:,} of {record.total_steps:,}"
        meters.append(MeterFact("Steps", text, summary.step, record.total_steps))
    limits = config.limits if config else None
    if limits is None:
        return meters
    if limits.max_tokens is not None:
        text = f"{usage.tokens:,.0f} of {limits.max_tokens:,}"
        meters.append(MeterFact("Tokens", text, usage.tokens, limits.max_tokens))
    if limits.max_hours is not None:
        durations = [format_duration(hours * 3600) for hours in (usage.hours, limits.max_hours)]
        text = " of ".join(durations)
        meters.append(MeterFact("Time", text, usage.hours, limits.max_hours))
    if limits.max_cost_usd is not None:
        text = f"${usage.cost_usd or 0:,.2f} of ${limits.max_cost_usd:,.2f}"
        meters.append(MeterFact("Cost", text, usage.cost_usd or 0.0, limits.max_cost_usd))
    return meters


def _describe_end(record: RunRecord, steps: list[Step]) -> str:
    """Return when a living run ends, by the pace of its last steps."""
    if record.has_ended:
        return ""
    eta_s = estimate_eta_s(record, steps)
    if eta_s is None:
        return "not known yet"
    return f"about {format_duration(eta_s)}"


def _list_checkpoints(
    record: RunRecord, run_dir: RunDir, steps: list[Step], curve: list[HeldOutPoint]
) -> list[CheckpointRow]:
    points = {point.step: point for point in curve}
    rows, previous = [], 0
    for manifest in Checkpoints(run_dir.checkpoints).list_intact():
        # The rewards since the checkpoint before say how good this one is.
        rewards = [
            step["reward/mean"]
            for step in steps
            if previous < step["step"] <= manifest.step and step.get("reward/mean") is not None
        ]
        mean = sum(rewards) / len(rewards) if rewards else None
        is_final = record.has_ended and manifest.step == record.total_steps
        rows.append(CheckpointRow(manifest.step, is_final, mean, points.get(manifest.step)))
        previous = manifest.step
    return rows


def _split_seconds(record: RunRecord, summary: RunSummary, steps: list[Step]) -> list[Amount]:
    """Return where the time went: waiting, training, starting, and all the rest."""
    if summary.duration_s is None or not steps:
        return []
    # Of a resumed run, only the start of the newest attempt is known.
    starting = 0.0
    if record.started_at and record.healthy_at:
        seconds = seconds_between(record.started_at, record.healthy_at)
        starting = min(summary.duration_s, max(0.0, seconds))
    parts = {
        "waiting for rollouts": sum(step.get("time/rollouts") or 0.0 for step in steps),
        "training": sum(step.get("time/train") or 0.0 for step in steps),
        "starting": starting,
    }
    parts["evaluating, saving, ending"] = max(0.0, summary.duration_s - sum(parts.values()))
    return [Amount(name, value, format_duration(value)) for name, value in parts.items()]


def _split_tokens(last_step: Step) -> list[Amount]:
    names = {"trained": "trained", "sampled": "sampled", "prefill": "prompts"}
    counts = {kind: last_step.get(f"tokens/{kind}_total") for kind in names}
    return [Amount(names[kind], count, f"{count:,.0f}") for kind, count in counts.items() if count]


def list_services(record: RunRecord, run_dir: RunDir) -> list[ServiceRow]:
    """Return the services of a run in the order of their start."""
    rows = []
    for name, service in record.services.items():
        state = describe_service_state(service.state, record.status)
        is_alarming = (
            name == record.failed_service or record.dead_environments.get(name) is not None
        )
        rows.append(ServiceRow(name, shorten_service_name(name), state, is_alarming))
    return rows
