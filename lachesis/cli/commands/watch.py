"""Watch a run until it ends, showing its phase, progress and reward curve."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lachesis.base.errors import RunStateError
from lachesis.base.formatting import format_dollars, format_reward
from lachesis.base.timestamps import seconds_between
from lachesis.cli import terminal
from lachesis.cli.options import Output, Runs
from lachesis.operations.run_lists import judge_run, list_runs
from lachesis.operations.runs import get_run
from lachesis.reporting.run_view import RunView
from lachesis.runs.held_out_results import describe_newest
from lachesis.runs.metrics import MetricsReader
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore

REFRESH_INTERVAL_S = 0.5
SERVER_POLL_INTERVAL_S = 2.0
SPEED_KEYS = ("tokens_per_second/sampled", "tokens_per_second/trained")


class WatchedRuns:
    """Hold the runs that are watched; of their metrics only new lines are parsed."""

    def __init__(self, store: RunStore, run_ids: Sequence[str]) -> None:
        self.store = store
        self.records = [get_run(store, run_id) for run_id in run_ids]
        self._readers = {run_id: MetricsReader(store.dir(run_id).metrics) for run_id in run_ids}

    def refresh(self, *, is_polled: bool) -> None:
        """Read the records again; with `is_polled`, query the server too."""
        self.records = [self._refresh(record, is_polled=is_polled) for record in self.records]

    def _refresh(self, record: RunRecord, *, is_polled: bool) -> RunRecord:
        if record.has_ended:
            return record
        if is_polled:
            return judge_run(self.store, get_run(self.store, record.run_id))
        return self.store.load(record.run_id).model_copy(update={"health": record.health})

    def judge(self) -> None:
        """Bring the judgement of each run up to date."""
        self.records = [judge_run(self.store, record) for record in self.records]

    def list_views(self) -> list[RunView]:
        """Return a view of each run."""
        return [
            RunView(record, self.store.dir(record.run_id), self._readers[record.run_id].read())
            for record in self.records
        ]


def watch_until_end(store: RunStore, run_id: str, *, quiet: bool = False) -> RunRecord:
    """Show the run until it has ended, and return its record.

    On a terminal the view is redrawn; elsewhere a line is printed now and then.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    return watch_runs(store, [run_id], quiet=quiet)[0]


def watch_runs(store: RunStore, run_ids: Sequence[str], *, quiet: bool = False) -> list[RunRecord]:
    """Show the runs until all have ended, and return their records; see `watch_until_end`."""
    watched = WatchedRuns(store, run_ids)
    polled_at = time.monotonic()
    # The records are read often and the server is asked rarely, because files are cheap.
    with _defer_interrupts() as raise_if_interrupted, _open_display(watched, quiet=quiet) as draw:
        while not all(record.has_ended for record in watched.records):
            draw()
            time.sleep(REFRESH_INTERVAL_S)
            raise_if_interrupted()
            is_polled = time.monotonic() - polled_at > SERVER_POLL_INTERVAL_S
            watched.refresh(is_polled=is_polled)
            if is_polled:
                polled_at = time.monotonic()
        watched.judge()
        draw()
    return watched.records


def watch(runs: Runs = (), /, *, options: Output = Output()) -> int:
    """Show the named runs, or all runs that have not ended, until they end.

    Raises:
        RunStateError: No run was named, and all have ended.
    """
    store = RunStore()
    run_ids = list(runs) or [record.run_id for record in list_runs(store) if not record.has_ended]
    if not run_ids:
        raise RunStateError(
            "no run is under way; `lachesis watch RUN` shows one that has ended, and `lachesis "
            "runs` lists all"
        )
    with explain_interrupt(run_ids):
        records = watch_runs(store, run_ids, quiet=options.json)
    answer = {record.run_id: record.status for record in records}
    ends = [f"run {record.run_id} is {record.status}" for record in records]
    terminal.print_answer(options, answer, "\n".join(ends))
    return 0 if all(record.status == "completed" for record in records) else 1


@contextlib.contextmanager
def explain_interrupt(run_ids: Sequence[str]) -> Iterator[None]:
    """Say after Ctrl-C that the runs go on, and how to look at them and to stop them."""
    try:
        yield
    except KeyboardInterrupt:
        names = " ".join(run_ids)
        goes_on = f"run {names} goes on" if len(run_ids) == 1 else f"runs {names} go on"
        stop = "; ".join(f"lachesis stop {run_id}" for run_id in run_ids)
        terminal.print_note(f"{goes_on}\nlook:  lachesis watch {names}\nstop:  {stop}")
        raise


@contextlib.contextmanager
def _defer_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt if Ctrl-C was pressed; a second one raises at
    once.

    Python discards an exception that is raised inside a destructor, and Ctrl-C with it, so that the
    run would continue.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    is_interrupted = False
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {
        number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN
    }

    def record_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        restore()

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def raise_if_interrupted() -> None:
        if is_interrupted:
            raise KeyboardInterrupt

    for number in handlers:
        signal.signal(number, record_interrupt)
    try:
        yield raise_if_interrupted
    finally:
        restore()


class _LineDisplay:
    """Print a line when the phase changes and every ten steps, as for a log file."""

    def __init__(self, record: RunRecord, *, has_prefix: bool = False) -> None:
        # Lines of several runs are told apart by the run's id.
        self.prefix = f"{record.run_id}  " if has_prefix else ""
        self.last_key = self.last_verdict = ""
        self.last_stalled_part: str | None = None
        terminal.print_sentence(f"run {record.run_id} of {record.environment}")

    def draw(self, view: RunView) -> None:
        """Print the changes since the last call."""
        record, step = view.record, view.summary.step
        self._print_stall_change(record, step)
        key = f"{record.phase} {step // 10}"
        if key == self.last_key:
            return
        self.last_key = key
        parts = [
            f"{record.phase}, step {step} of {record.total_steps}",
            *filter(None, (_describe_reward(view), describe_newest(view.curve))),
        ]
        time_text = f"{self.prefix}{_compute_elapsed_s(record):6.1f} s"
        terminal.print_sentence(f"{time_text}  {', '.join(parts)}")
        if view.verdict.mark.word != self.last_verdict:
            self.last_verdict = view.verdict.mark.word
            terminal.console.print(_render_verdict(view))

    def _print_stall_change(self, record: RunRecord, step: int) -> None:
        """Print a line when a stall begins and when it ends."""
        part = record.stall["part"] if record.stall else None
        if part == self.last_stalled_part:
            return
        if record.stall_text:
            text = Text(terminal.localize_times(record.stall_text), style="red")
        elif record.has_ended:
            text = Text(f"the stall in {self.last_stalled_part} ended with the run")
        else:
            text = Text(f"no longer stalled in {self.last_stalled_part}, at step {step}")
        self.last_stalled_part = part
        terminal.print_sentence(
            Text(f"{self.prefix}{_compute_elapsed_s(record):6.1f} s  ").append_text(text)
        )


@contextlib.contextmanager
def _open_display(watched: WatchedRuns, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """Yield a function that shows the runs as they are now."""
    if quiet:
        yield lambda: None
    elif terminal.console.is_terminal:
        with Live(console=terminal.console, auto_refresh=False) as live:
            yield lambda: live.update(_render_panels(watched.list_views()), refresh=True)
    else:
        has_prefix = len(watched.records) > 1
        displays = [_LineDisplay(record, has_prefix=has_prefix) for record in watched.records]

        def draw_lines() -> None:
            for display, view in zip(displays, watched.list_views(), strict=True):
                display.draw(view)

        yield draw_lines


def _render_panels(views: Sequence[RunView]) -> RenderableType:
    """Return the panels of all runs, with an empty line between them."""
    parts: list[RenderableType] = []
    for view in views:
        parts += [*([Text()] if parts else []), render_panel(view)]
    return Group(*parts)


def render_panel(view: RunView) -> RenderableType:
    """Return the panel of one run: its progress, reward, held-out results and verdict."""
    record, step = view.record, view.summary.step
    table = Table.grid(padding=(0, 2))
    table.add_row(
        f"run {record.run_id}",
        record.environment,
        record.phase,
        f"{_compute_elapsed_s(record):.0f} s",
    )
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        ProgressBar(total=record.total_steps, completed=step, width=40),
        f"step {step} of {record.total_steps}{terminal.format_eta(view.eta_s)}",
    )
    lines: list[RenderableType] = [table, bar, _render_reward(view)]
    if held_out := describe_newest(view.curve):
        curve = terminal.draw_sparkline([point.percent_correct for point in view.curve])
        lines.append(Text(f"{held_out}  {curve}"))
    lines += [Text(text) for text in [view.pause or ""] if text]
    lines += _render_speed(view)
    if record.stall_text:
        lines.append(Text(terminal.localize_times(record.stall_text), style="red"))
    return Group(*lines, _render_verdict(view))


def _render_reward(view: RunView) -> Text:
    if not view.steps:
        return Text("waiting for the first rollouts")
    rewards = [step.get("reward/mean") for step in view.steps]
    return Text(f"{_describe_reward(view)}  {terminal.draw_sparkline(rewards)}")


def _describe_reward(view: RunView) -> str | None:
    """Return the mean reward of the last steps."""
    if not view.steps:
        return None
    count = view.summary.reward_steps
    window = f"mean of {count} steps" if count > 1 else "one step"
    return f"reward {format_reward(view.summary.reward.get('last'))} ({window})"


def _render_speed(view: RunView) -> list[RenderableType]:
    """Return the line of speeds: seconds a step, tokens a second, and the cost so far."""
    if not view.steps:
        return []
    last_step = view.last_step
    parts = [f"{last_step['time/step']:.2f} s a step"] if last_step.get("time/step") else []
    parts += [
        f"{last_step[key]:,.0f} {key.rsplit('/', 1)[1]} tokens a second"
        for key in SPEED_KEYS
        if last_step.get(key)
    ]
    if view.usage.cost_usd is not None:
        parts.append(format_dollars(view.usage.cost_usd))
    return [Text("  ".join(parts), style="dim")]


def _render_verdict(view: RunView) -> Text:
    """Return the word of the verdict with its first evidence."""
    mark, evidence = view.verdict.mark, view.record.evidence
    words = f"verdict: {mark.word}" + (f" ({evidence})" if evidence else "")
    return Text(words, style=terminal.TONE_STYLES[mark.tone])


def _compute_elapsed_s(record: RunRecord) -> float:
    return seconds_between(record.created_at, record.ended_at if record.has_ended else None)
