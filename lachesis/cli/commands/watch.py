"""Watch a run until it ends, showing its phase, progress and reward curve."""

from __future__ import annotations

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
from lachesis.base.timestamps import seconds_between
from lachesis.cli import terminal
from lachesis.cli.options import Output, Runs
from lachesis.monitor.run_health import refresh_health
from lachesis.operations.run_lists import list_runs
from lachesis.operations.runs import get_run, read_metrics
from lachesis.runs.held_out_results import build_held_out_curve, describe_point
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore

Draw = Callable[[RunStore, Sequence[RunRecord]], None]
REFRESH_INTERVAL_S = 0.5
SERVER_POLL_INTERVAL_S = 2.0
SPEED_KEYS = ("tokens_per_second/sampled", "tokens_per_second/trained")


def watch_until_end(store: RunStore, run_id: str, *, quiet: bool = False) -> RunRecord:
    """Show the run until it has ended, and return its record.

    On a terminal the view is redrawn; elsewhere a line is printed now and then.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    return watch_runs(store, [run_id], quiet=quiet)[0]


def watch_runs(store: RunStore, run_ids: Sequence[str], *, quiet: bool = False) -> list[RunRecord]:
    """Show the runs until all have ended, and return their records; see `watch_until_end`."""
    records = [get_run(store, run_id) for run_id in run_ids]
    polled_at = time.monotonic()
    # The records are read often and the server is asked rarely, because files are cheap.
    with _defer_interrupts() as raise_if_interrupted, _open_view(records, quiet=quiet) as draw:
        while not all(record.has_ended for record in records):
            draw(store, records)
            time.sleep(REFRESH_INTERVAL_S)
            raise_if_interrupted()
            is_polled = time.monotonic() - polled_at > SERVER_POLL_INTERVAL_S
            records = [_refresh(store, record, is_polled=is_polled) for record in records]
            if is_polled:
                polled_at = time.monotonic()
        records = [refresh_health(store, record) for record in records]
        draw(store, records)
    return records


def _refresh(store: RunStore, record: RunRecord, *, is_polled: bool) -> RunRecord:
    """Return the record of a run as it is now; with `is_polled` the server is asked too."""
    if record.has_ended:
        return record
    if is_polled:
        return refresh_health(store, get_run(store, record.run_id))
    return store.load(record.run_id).model_copy(update={"health": record.health})


def watch(runs: Runs = (), /, *, options: Output = Output()) -> int:
    """Show the runs that were named, or all that have not ended.

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


class _LineView:
    """A view for log files: one line when the phase changes and every ten steps."""

    def __init__(self, record: RunRecord, *, has_prefix: bool = False) -> None:
        # Lines of several runs are told apart by the run's id.
        self.prefix = f"{record.run_id}  " if has_prefix else ""
        self.last_key = self.last_health_level = ""
        self.last_stalled_part: str | None = None
        terminal.print_sentence(f"run {record.run_id} of {record.environment}")

    def __call__(self, store: RunStore, record: RunRecord) -> None:
        steps = read_metrics(store, record.run_id)
        step = steps[-1]["step"] if steps else 0
        self._print_stall_change(record, step)
        key = f"{record.phase} {step // 10}"
        if key != self.last_key:
            self.last_key = key
            if steps:
                reward = f", reward {_compute_recent_reward(steps):.3f} ({_describe_window(steps)})"
            else:
                reward = ""
            if point := _describe_newest_held_out(steps):
                held_out = f", held out {point}"
            else:
                held_out = ""
            progress_text = f"{record.phase}, step {step} of {record.total_steps}"
            time_text = f"{self.prefix}{_compute_elapsed_s(record):6.1f} s"
            terminal.print_sentence(f"{time_text}  {progress_text}{reward}{held_out}")
            if record.learning != self.last_health_level:
                self.last_health_level = record.learning
                terminal.console.print(_render_learning(record))

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
def _open_view(records: Sequence[RunRecord], *, quiet: bool) -> Iterator[Draw]:
    if quiet:
        yield lambda store, records: None
    elif terminal.console.is_terminal:
        with Live(console=terminal.console, auto_refresh=False) as live:
            yield lambda store, records: live.update(_render_panels(store, records), refresh=True)
    else:
        has_prefix = len(records) > 1
        views = {record.run_id: _LineView(record, has_prefix=has_prefix) for record in records}

        def draw_lines(store: RunStore, records: Sequence[RunRecord]) -> None:
            for record in records:
                views[record.run_id](store, record)

        yield draw_lines


def _render_panels(store: RunStore, records: Sequence[RunRecord]) -> RenderableType:
    """Return the views of all runs, with an empty line between them."""
    parts: list[RenderableType] = []
    for record in records:
        parts += [*([Text()] if parts else []), _render_panel(store, record)]
    return Group(*parts)


def _render_panel(store: RunStore, record: RunRecord) -> RenderableType:
    steps = read_metrics(store, record.run_id)
    step = steps[-1]["step"] if steps else 0
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
        f"step {step} of {record.total_steps}",
    )
    rewards = [step_metrics.get("reward/mean") or 0.0 for step_metrics in steps]
    curve = Text(
        f"reward {_compute_recent_reward(steps):.3f} ({_describe_window(steps)})  "
        f"{terminal.draw_sparkline(rewards)}"
        if steps
        else "waiting for the first rollouts"
    )
    return Group(
        table, bar, curve, *_render_held_out(steps), *_render_speed(steps), *_render_health(record)
    )


def _describe_newest_held_out(steps: list[dict[str, float]]) -> str | None:
    """Return the newest held-out result as text."""
    curve = build_held_out_curve(steps)
    if curve:
        return f"{describe_point(curve[-1])} at step {curve[-1].step}"
    return None


def _render_held_out(steps: list[dict[str, float]]) -> list[RenderableType]:
    """Return the newest held-out result with its curve."""
    shares = [point.percent_correct for point in build_held_out_curve(steps)]
    if shares:
        return [
            Text(f"held out {_describe_newest_held_out(steps)}  {terminal.draw_sparkline(shares)}")
        ]
    return []


def _render_speed(steps: list[dict[str, float]]) -> list[RenderableType]:
    if not steps:
        return []
    last_step = steps[-1]
    if last_step.get("time/step"):
        parts = [f"{last_step['time/step']:.2f} s a step"]
    else:
        parts = []
    parts += [
        f"{last_step[key]:,.0f} {key.rsplit('/', 1)[1]} tokens a second"
        for key in SPEED_KEYS
        if last_step.get(key)
    ]
    if last_step.get("cost/total") is not None:
        parts += [f"{last_step['cost/total']:.2f} US dollars"]
    return [Text("  ".join(parts), style="dim")]


def _render_health(record: RunRecord) -> list[RenderableType]:
    """Return the monitor's stall, if there is one, and the judgement of learning."""
    lines: list[RenderableType] = []
    if record.stall_text:
        lines.append(Text(terminal.localize_times(record.stall_text), style="red"))
    return [*lines, _render_learning(record)]


def _render_learning(record: RunRecord) -> Text:
    """Return the word of the judgement with its first evidence."""
    words = f"learning: {record.learning}" + (f" ({record.evidence})" if record.evidence else "")
    # Nothing is shown in green while the run stands still.
    return Text(
        words, style="" if record.stall else terminal.HEALTH_STYLES.get(record.learning, "")
    )


def _compute_recent_reward(steps: list[dict[str, float]]) -> float:
    rewards = [step.get("reward/mean") or 0.0 for step in steps[-5:]]
    return sum(rewards) / len(rewards)


def _describe_window(steps: list[dict[str, float]]) -> str:
    if len(steps) > 1:
        return f"mean of {min(5, len(steps))} steps"
    return "one step"


def _compute_elapsed_s(record: RunRecord) -> float:
    return seconds_between(record.created_at, record.ended_at if record.has_ended else None)
