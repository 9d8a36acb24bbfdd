"""Watch a run until it ends: phase, progress, reward and its curve."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lachesis.cli import show
from lachesis.monitor.judgement import refresh_health
from lachesis.runs.held_out import describe_point, build_held_out_curve
from lachesis.runs.store import RunRecord, seconds_between
from lachesis.service import Service

Draw = Callable[[Service, RunRecord], None]
REFRESH_S = 0.5
ASK_SERVER_S = 2.0
SPEEDS = ("tokens_per_second/sampled", "tokens_per_second/trained")


def until_end(service: Service, run_id: str, *, quiet: bool = False) -> RunRecord:
    """Show the run until it has ended, and return its record.

    On a terminal the view is redrawn, elsewhere a line is printed now and then. Raises KeyboardInterrupt.
    """
    record = service.get(run_id)
    asked = time.monotonic()
    with _interrupt_between_looks() as raise_if_interrupted, _view(record, quiet=quiet) as draw:
        while not record.has_ended:
            draw(service, record)
            time.sleep(REFRESH_S)
            raise_if_interrupted()
            if time.monotonic() - asked > ASK_SERVER_S:
                asked, record = time.monotonic(), refresh_health(service.store, service.get(run_id))
            else:
                record = service.store.load(run_id).model_copy(update={"health": record.health})
        record = refresh_health(service.store, record)
        draw(service, record)
    return record


@contextlib.contextmanager
def _interrupt_between_looks() -> Iterator[Callable[[], None]]:
    """Give a function that raises KeyboardInterrupt if Ctrl-C was pressed since. A second Ctrl-C raises at once.

    Python forgets an exception that is raised while it removes an object, and Ctrl-C with it: the run would train on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    interrupted = False
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        restore()

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def raise_if_interrupted() -> None:
        if interrupted:
            raise KeyboardInterrupt

    for number in handlers:
        signal.signal(number, note)
    try:
        yield raise_if_interrupted
    finally:
        restore()


class _Lines:
    """For a log file: one line when the phase changes and every ten steps."""

    def __init__(self, record: RunRecord) -> None:
        self.last = self.word = ""
        show.console.print(f"run {record.run_id} of {record.environment}")

    def __call__(self, service: Service, record: RunRecord) -> None:
        steps = service.metrics(record.run_id)
        step = steps[-1]["step"] if steps else 0
        key = f"{record.phase} {step // 10}"
        if key != self.last:
            self.last = key
            reward = f", reward {_recent(steps):.3f} ({_of_how_many(steps)})" if steps else ""
            held_out = f", held out {point}" if (point := _newest(steps)) else ""
            place = f"{record.phase}, step {step} of {record.total_steps}"
            show.console.print(f"{_elapsed(record):6.1f} s  {place}{reward}{held_out}")
            if record.learning != self.word:
                self.word = record.learning
                show.console.print(_learning(record))


@contextlib.contextmanager
def _view(record: RunRecord, *, quiet: bool) -> Iterator[Draw]:
    if quiet:
        yield lambda service, record: None
    elif show.console.is_terminal:
        with Live(console=show.console, auto_refresh=False) as live:
            yield lambda service, record: live.update(_panel(service, record), refresh=True)
    else:
        yield _Lines(record)


def _panel(service: Service, record: RunRecord) -> RenderableType:
    steps = service.metrics(record.run_id)
    step = steps[-1]["step"] if steps else 0
    table = Table.grid(padding=(0, 2))
    table.add_row(f"run {record.run_id}", record.environment, record.phase, f"{_elapsed(record):.0f} s")
    bar = Table.grid(padding=(0, 2))
    bar.add_row(ProgressBar(total=record.total_steps, completed=step, width=40), f"step {step} of {record.total_steps}")
    rewards = [one.get("reward/mean") or 0.0 for one in steps]
    curve = Text(
        f"reward {_recent(steps):.3f} ({_of_how_many(steps)})  {show.sparkline(rewards)}"
        if steps
        else "waiting for the first rollouts"
    )
    return Group(table, bar, curve, *_held_out(steps), *_speed(steps), *_judged(record))


def _newest(steps: list[dict[str, float]]) -> str | None:
    """Return the newest held-out result in words."""
    curve = build_held_out_curve(steps)
    return f"{describe_point(curve[-1])} at step {curve[-1].step}" if curve else None


def _held_out(steps: list[dict[str, float]]) -> list[RenderableType]:
    """Return the newest held-out result with its curve."""
    shares = [point.percent_correct for point in build_held_out_curve(steps)]
    return [Text(f"held out {_newest(steps)}  {show.sparkline(shares)}")] if shares else []


def _speed(steps: list[dict[str, float]]) -> list[RenderableType]:
    if not steps:
        return []
    last = steps[-1]
    parts = [f"{last['time/step']:.2f} s a step"] if last.get("time/step") else []
    parts += [f"{last[key]:,.0f} {key.rsplit('/', 1)[1]} tokens a second" for key in SPEEDS if last.get(key)]
    parts += [] if last.get("cost/total") is None else [f"{last['cost/total']:.2f} US dollars"]
    return [Text("  ".join(parts), style="dim")]


def _judged(record: RunRecord) -> list[RenderableType]:
    """Return the stall that the monitor has found, if there is one, and the judgement of learning."""
    stall = (record.health or {}).get("stalled")
    lines = [f"stalled in {stall['part']} since {stall['since']}: {stall['evidence']}"] if stall else []
    return [*(Text(line, style="red") for line in lines), _learning(record)]


def _learning(record: RunRecord) -> Text:
    """Return the word of the judgement with its first evidence."""
    words = f"learning: {record.learning}" + (f" ({record.evidence})" if record.evidence else "")
    return Text(words, style=show.WORD_STYLES.get(record.learning, ""))


def _recent(steps: list[dict[str, float]]) -> float:
    last = [one.get("reward/mean") or 0.0 for one in steps[-5:]]
    return sum(last) / len(last)


def _of_how_many(steps: list[dict[str, float]]) -> str:
    return f"mean of {min(5, len(steps))} steps" if len(steps) > 1 else "one step"


def _elapsed(record: RunRecord) -> float:
    return seconds_between(record.created_at, record.ended_at if record.has_ended else None)
