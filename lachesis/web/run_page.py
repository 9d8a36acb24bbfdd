"""Lay out the pages of one run: overview, metrics, settings and logs, and serve them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from lachesis.base.formatting import (
    MISSING,
    format_decimal,
    format_dollars,
    format_duration,
    format_reward,
)
from lachesis.base.timestamps import seconds_between
from lachesis.operations.runs import get_run_url
from lachesis.reporting.charts import ChosenCharts, choose_charts, list_metrics
from lachesis.reporting.run_cache import RunCache, stat_file
from lachesis.reporting.run_headline import RunVerdict, Trouble, describe_trouble
from lachesis.reporting.run_logs import MAX_LINES, TAIL_LINES, choose_log, find_log, view_log
from lachesis.reporting.run_settings import SettingRow, list_settings
from lachesis.reporting.run_summary import RunSummary, get_model_name
from lachesis.reporting.run_view import RunView, list_forecast_ranges
from lachesis.runs.folder import shorten_service_name
from lachesis.runs.provenance import read_provenance
from lachesis.runs.record import RunRecord, describe_service_state
from lachesis.runs.suggested_commands import format_repeat
from lachesis.web.curves import read_curve_request
from lachesis.web.live_updates import answer_unchanged, describe_pace, make_tag, read_run_state
from lachesis.web.rendering import make_csv_response, make_page


class Fact(NamedTuple):
    """Hold one line of the facts beside the verdict."""

    name: str
    value: str
    link: str = ""


class MeterFact(NamedTuple):
    """Hold a budget: its used part, and its limit."""

    name: str
    text: str
    used: float
    limit: float


class Amount(NamedTuple):
    """Hold a part of a whole, for a bar and its legend."""

    name: str
    value: float
    text: str


class ServiceRow(NamedTuple):
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
        """Return the numbers of the run for lists."""
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
        command=format_repeat(record),
        started_by=str((read_provenance(view.run_dir) or {}).get("command") or ""),
        services=list_services(record),
    )  # fmt: skip


def _list_results(view: RunView) -> list[Fact]:
    """Return the results of the run; a living run has meters in place of most of them."""
    record, summary, took = view.record, view.summary, view.summary.duration_s
    facts = [Fact("Attempt", str(record.attempt))] if record.attempt > 1 else []
    if summary.reward.get("last") is not None:
        rewards = (summary.reward.get("first"), summary.reward.get("last"))
        facts.append(Fact("Reward", " to ".join(map(format_reward, rewards))))
    if better := view.weights.best:
        facts.append(Fact("Best checkpoint", f"step {better.step:,}"))
    if record.has_ended:
        facts += [
            Fact("Steps", f"{summary.step:,} of {record.total_steps:,}"),
            Fact("Took", MISSING if took is None else format_duration(took)),
            Fact("Tokens", f"{view.usage.tokens:,.0f}"),
            Fact("Cost", _describe_cost(view)),
        ]
    return facts


def _list_settings(view: RunView) -> list[Fact]:
    """Return the settings that the page of a run begins with."""
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
    """Return the forecast of all steps as facts."""
    if view.forecast is None:
        return []
    return [Fact(f"Forecast of {name}", span) for name, span in list_forecast_ranges(view.forecast)]


def _list_links(view: RunView) -> list[Fact]:
    """Return the links of a run to Prefect and W&B."""
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
    rows, dead = [], record.dead_environments
    for name, service in record.services.items():
        state = describe_service_state(service.state, record.status)
        is_alarming = name == record.failed_service or dead.get(name) is not None
        rows.append(ServiceRow(name, shorten_service_name(name), state, is_alarming))
    return rows


def _get_view(request: Request) -> RunView:
    """Return the run that the address names.

    Raises:
        UnknownRunError: There is no such run.
        StorageError: Its record is damaged.
    """
    cache: RunCache = request.app.state.cache
    return cache.view(request.path_params["run_id"])


def show_run(request: Request) -> Response:
    """Answer with the overview of a run."""
    view = _get_view(request)
    record, log = view.record, choose_log(view.record)
    tag = "" if record.has_ended else make_tag(request, read_run_state(view, log))
    if tag and (unchanged := answer_unchanged(request, tag)):
        return unchanged
    page = make_run_page(view)
    return make_page(
        request,
        "run.html.j2",
        section="runs",
        tab="overview",
        tag=tag,
        record=record,
        page=page,
        pace=describe_pace(view),
        curve_request=read_curve_request(request),
        log=view_log(record, view.run_dir, log, max_lines=TAIL_LINES),
    )


def show_metrics(request: Request) -> Response:
    """Answer with a curve of each metric of a run."""
    view = _get_view(request)
    names = list_metrics(view.steps)
    search_text = request.query_params.get("q", "").casefold()
    return make_page(
        request,
        "run_metrics.html.j2",
        section="runs",
        tab="metrics",
        record=view.record,
        metrics=[name for name in names if search_text in name.casefold()],
        num_metrics=len(names),
        text=search_text,
        curve_request=read_curve_request(request),
    )


def show_settings(request: Request) -> Response:
    """Answer with all settings of a run."""
    view = _get_view(request)
    return make_page(
        request,
        "run_settings.html.j2",
        section="runs",
        tab="settings",
        record=view.record,
        settings=list_settings(view.record, view.config) if view.config else [],
    )


def _list_checkpoints(view: RunView) -> list[dict[str, object]]:
    """Return the checkpoints that are kept, each with its held-out result in columns of its own."""
    rows: list[dict[str, object]] = []
    for checkpoint in view.checkpoints:
        point = checkpoint.held_out.model_dump() if checkpoint.held_out else {}
        held_out = {f"held_out_{name}": value for name, value in point.items()}
        rows.append({**asdict(checkpoint), **held_out})
        del rows[-1]["held_out"]
    return rows


# The tables of a run that can be saved, by the name of the file.
TABLES: dict[str, Callable[[RunView], list[dict[str, object]]]] = {
    "settings": lambda view: [
        asdict(row) for row in (list_settings(view.record, view.config) if view.config else [])
    ],
    "checkpoints": _list_checkpoints,
    "attempts": lambda view: [attempt.model_dump(mode="json") for attempt in view.attempts],
}


def download_table(request: Request) -> Response:
    """Answer with one of the tables of a run as CSV."""
    view = _get_view(request)
    name = request.url.path.rpartition("/")[2].removesuffix(".csv")
    return make_csv_response(f"{name}-{view.record.run_id}.csv", TABLES[name](view))


def show_log(request: Request) -> Response:
    """Answer with one log of a run, or its lines that contain a search text."""
    cache: RunCache = request.app.state.cache
    record = cache.load_record(request.path_params["run_id"])
    run_dir = cache.store.dir(record.run_id)
    name = request.path_params.get("log") or choose_log(record)
    state = (stat_file(run_dir.record), stat_file(find_log(record, run_dir, name)))
    tag = "" if record.has_ended else make_tag(request, state)
    if tag and (unchanged := answer_unchanged(request, tag)):
        return unchanged
    text = request.query_params.get("q", "")
    return make_page(
        request,
        "run_log.html.j2",
        section="runs",
        tab="logs",
        tag=tag,
        record=record,
        services=list_services(record),
        log=view_log(record, run_dir, name, text=text, max_lines=MAX_LINES),
    )


def download_log(request: Request) -> Response:
    """Answer with a whole log as a text file."""
    cache: RunCache = request.app.state.cache
    record = cache.load_record(request.path_params["run_id"])
    file = find_log(record, cache.store.dir(record.run_id), request.path_params["log"])
    return FileResponse(file, media_type="text/plain", filename=file.name)


# The download stands before the page, whose pattern fits it too.
RUN_ROUTES = [
    Route("/runs/{run_id}", show_run),
    Route("/runs/{run_id}/metrics", show_metrics),
    Route("/runs/{run_id}/settings", show_settings),
    *(Route(f"/runs/{{run_id}}/{name}.csv", download_table) for name in TABLES),
    Route("/runs/{run_id}/logs", show_log),
    Route("/runs/{run_id}/logs/{log}.txt", download_log),
    Route("/runs/{run_id}/logs/{log}", show_log),
]
