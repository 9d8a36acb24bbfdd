"""Gather what the page of a run shows: verdict, facts, curves, settings, attempts and services."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lachesis.base.formatting import (
    MISSING,
    format_decimal,
    format_dollars,
    format_duration,
    format_reward,
)
from lachesis.base.timestamps import seconds_between
from lachesis.operations.runs import get_run_url
from lachesis.reporting.charts import ChosenCharts, choose_charts
from lachesis.reporting.next_steps import make_repeat_command
from lachesis.reporting.run_headline import RunVerdict, Trouble, describe_trouble
from lachesis.reporting.run_settings import SettingRow, list_settings
from lachesis.reporting.run_summary import RunSummary, get_model_name
from lachesis.reporting.run_view import RunView, list_forecast_ranges
from lachesis.runs.folder import shorten_service_name
from lachesis.runs.provenance import read_provenance
from lachesis.runs.record import RunRecord, describe_service_state


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
class ServiceRow:
    """Hold a service of the run and the name of its log."""

    name: str
    log: str
    state: str
    is_alarming: bool


@dataclass(frozen=True)
class RunPage:
    """Lay out what the page of one run shows."""

    view: RunView
    next_steps: list[str]
    facts: list[list[Fact]]
    """The facts in groups."""
    meters: list[MeterFact]
    ends_in: str
    trouble: Trouble | None
    """What shows why it needs a look, if it needs one."""
    charts: ChosenCharts
    seconds: list[Amount]
    tokens: list[Amount]
    settings: list[SettingRow]
    command: str
    """Starts the same run again; one line per option."""
    started_by: str
    """The command line that has started it, or nothing."""
    services: list[ServiceRow]

    @property
    def record(self) -> RunRecord:
        """Return the record of the run."""
        return self.view.record

    @property
    def summary(self) -> RunSummary:
        """Return what a list shows of the run."""
        return self.view.summary

    @property
    def verdict(self) -> RunVerdict:
        """Return how the run went."""
        return self.view.verdict


def make_run_page(view: RunView) -> RunPage:
    """Return the page of a run."""
    record, config = view.record, view.config
    charts = choose_charts(view.steps)
    group_size = config.env.group_size if config else 0
    return RunPage(
        view=view,
        next_steps=view.list_next_steps(),
        facts=[group for group in (_list_results(view), _list_settings(view), _list_forecast(view),
                                   _list_links(view)) if group],
        meters=_list_meters(view),
        ends_in=_describe_end(view),
        trouble=describe_trouble(record, view.verdict, charts.small, view.steps, group_size),
        charts=charts,
        seconds=_split_seconds(view),
        tokens=_split_tokens(view),
        settings=list_settings(record, config) if config else [],
        command=make_repeat_command(record),
        started_by=str((read_provenance(view.run_dir) or {}).get("command") or ""),
        services=list_services(record),
    )  # fmt: skip


def _list_results(view: RunView) -> list[Fact]:
    """Return what the run has made. A living run has meters in place of most of it."""
    record, summary = view.record, view.summary
    facts = [Fact("Attempt", str(record.attempt))] if record.attempt > 1 else []
    if summary.reward.get("last") is not None:
        rewards = (summary.reward.get("first"), summary.reward.get("last"))
        facts.append(Fact("Reward", " to ".join(map(format_reward, rewards))))
    if better := view.weights.best:
        facts.append(Fact("Best checkpoint", f"step {better.step:,}"))
    if record.has_ended:
        facts += [
            Fact("Steps", f"{summary.step:,} of {record.total_steps:,}"),
            Fact(
                "Took",
                MISSING if summary.duration_s is None else format_duration(summary.duration_s),
            ),
            Fact("Tokens", f"{view.usage.tokens:,.0f}"),
            Fact("Cost", _describe_cost(view)),
        ]
    return facts


def _list_settings(view: RunView) -> list[Fact]:
    record, config = view.record, view.config
    facts = [Fact("Environment", record.environment), Fact("Model", get_model_name(record))]
    if config is not None:
        groups = config.env.batch_size // config.env.group_size
        rate = format_decimal(config.tinker.learning_rate)
        facts += [
            Fact("Rollouts a step", f"{groups} groups of {config.env.group_size}"),
            Fact("Learning rate", f"{rate}, {config.tinker.learning_rate_schedule}"),
            Fact("Seed", str(record.seed)),
        ]
    if record.forked_from:
        facts.append(Fact("Started from", record.forked_from))
    if record.schedule:
        facts.append(Fact("Schedule", record.schedule))
    return facts


def _list_forecast(view: RunView) -> list[Fact]:
    """Return what a test of the same code forecast for all steps."""
    if view.forecast is None:
        return []
    return [Fact(f"Forecast of {name}", span) for name, span in list_forecast_ranges(view.forecast)]


def _list_links(view: RunView) -> list[Fact]:
    record, links = view.record, []
    if url := get_run_url(record):
        links.append(Fact("Prefect", f"flow run {(record.flow_run_id or '')[:8]}", url))
    if record.wandb_url:
        links.append(Fact("W&B", record.wandb_run_name, record.wandb_url))
    elif view.wandb_folder:
        links.append(Fact("W&B", "offline, not sent"))
    return links


def _describe_cost(view: RunView) -> str:
    if view.usage.cost_usd is not None:
        return format_dollars(view.usage.cost_usd)
    profile = view.record.profile
    return f"none, profile {profile}" if profile == "embedded" else "not known"


def _list_meters(view: RunView) -> list[MeterFact]:
    """Return the steps of a living run, and each budget, as parts of their limits."""
    meters = []
    record, summary = view.record, view.summary
    if not record.has_ended:
        text = f"{summary.step:,} of {record.total_steps:,}"
        meters.append(MeterFact("Steps", text, summary.step, record.total_steps))
    for budget in view.budgets:
        name, write = _BUDGET_WORDS[budget.field]
        text = f"{write(budget.used)} of {write(budget.limit)}"
        meters.append(MeterFact(name, text, budget.used, budget.limit))
    return meters


# The name of each budget, and how its amounts are written.
_BUDGET_WORDS: dict[str, tuple[str, Callable[[float], str]]] = {
    "max_tokens": ("Tokens", lambda tokens: f"{tokens:,.0f}"),
    "max_hours": ("Time", lambda hours: format_duration(hours * 3600)),
    "max_cost_usd": ("Cost", format_dollars),
}


def _describe_end(view: RunView) -> str:
    """Return when a living run ends, by the pace of its last steps."""
    if view.record.has_ended:
        return ""
    return "not known yet" if view.eta_s is None else f"about {format_duration(view.eta_s)}"


def _split_seconds(view: RunView) -> list[Amount]:
    """Return where the time went: waiting, training, starting, and all the rest."""
    record, duration_s = view.record, view.summary.duration_s
    if duration_s is None or not view.steps:
        return []
    # Of a resumed run, only the start of the newest attempt is known.
    starting = 0.0
    if record.started_at and record.healthy_at:
        seconds = seconds_between(record.started_at, record.healthy_at)
        starting = min(duration_s, max(0.0, seconds))
    parts = {
        "waiting for rollouts": sum(step.get("time/rollouts") or 0.0 for step in view.steps),
        "training": sum(step.get("time/train") or 0.0 for step in view.steps),
        "starting": starting,
    }
    parts["evaluating, saving, ending"] = max(0.0, duration_s - sum(parts.values()))
    return [Amount(name, value, format_duration(value)) for name, value in parts.items()]


def _split_tokens(view: RunView) -> list[Amount]:
    names = {"trained": "trained", "sampled": "sampled", "prefill": "prompts"}
    counts = view.tokens.model_dump() if view.steps else {}
    return [
        Amount(name, counts[kind], f"{counts[kind]:,.0f}")
        for kind, name in names.items()
        if counts.get(kind)
    ]


def list_services(record: RunRecord) -> list[ServiceRow]:
    """Return the services of a run in the order of their start."""
    rows = []
    for name, service in record.services.items():
        state = describe_service_state(service.state, record.status)
        is_alarming = (
            name == record.failed_service or record.dead_environments.get(name) is not None
        )
        rows.append(ServiceRow(name, shorten_service_name(name), state, is_alarming))
    return rows
