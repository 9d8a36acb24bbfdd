"""Watch a run until it ends: phase, progress, reward and its curve."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lachesis.cli import show
from lachesis.runs import RunRecord, seconds_between
from lachesis.service import Service

Draw = Callable[[Service, RunRecord], None]
REFRESH_S = 0.5
ASK_SERVER_S = 2.0
SPEEDS = ("tokens_per_second/sampled", "tokens_per_second/trained")


def until_end(service: Service, run_id: str, *, quiet: bool = False) -> RunRecord:
    """The record of the run once it has ended. On a terminal the view is redrawn, elsewhere a line is printed now and then."""
    record = service.get(run_id)
    asked = time.monotonic()
    with _view(record, quiet=quiet) as draw:
        while not record.ended:
            draw(service, record)
            time.sleep(REFRESH_S)
            if time.monotonic() - asked > ASK_SERVER_S:
                asked, record = time.monotonic(), service.get(run_id)
            else:
                record = service.store.load(run_id)
        draw(service, record)
    return record


class _Lines:
    """For a log file: one line when the phase changes and every ten steps."""

    def __init__(self, record: RunRecord) -> None:
        self.last = ""
        show.console.print(f"run {record.run_id} of {record.environment}")

    def __call__(self, service: Service, record: RunRecord) -> None:
        steps = service.metrics(record.run_id)
        step = steps[-1]["step"] if steps else 0
        key = f"{record.phase} {step // 10}"
        if key != self.last:
            self.last = key
            reward = f", reward {_recent(steps):.3f} ({_of_how_many(steps)})" if steps else ""
            show.console.print(f"{_elapsed(record):6.1f} s  {record.phase}, step {step} of {record.total_steps}{reward}")


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
    return Group(table, bar, curve, *_speed(steps), *_judged(record))


def _speed(steps: list[dict[str, float]]) -> list[RenderableType]:
    if not steps:
        return []
    last = steps[-1]
    parts = [f"{last['time/step']:.2f} s a step"] if last.get("time/step") else []
    parts += [f"{last[key]:,.0f} {key.rsplit('/', 1)[1]} tokens a second" for key in SPEEDS if last.get(key)]
    parts += [] if last.get("cost/total") is None else [f"{last['cost/total']:.2f} US dollars"]
    return [Text("  ".join(parts), style="dim")]


def _judged(record: RunRecord) -> list[RenderableType]:
    """What the monitor said last, at most a minute ago."""
    health = record.health or {}
    stall = health.get("stalled")
    lines = [f"stalled in {stall['part']} since {stall['since']}: {stall['evidence']}"] if stall else []
    if health.get("word") in ("suspect", "broken"):
        lines.append(f"learning is {health['word']}: {'; '.join(health['evidence'])}")
    return [Text(line, style="red") for line in lines]


def _recent(steps: list[dict[str, float]]) -> float:
    last = [one.get("reward/mean") or 0.0 for one in steps[-5:]]
    return sum(last) / len(last)


def _of_how_many(steps: list[dict[str, float]]) -> str:
    return f"mean of {min(5, len(steps))} steps" if len(steps) > 1 else "one step"


def _elapsed(record: RunRecord) -> float:
    return seconds_between(record.created_at, record.ended_at if record.ended else None)
