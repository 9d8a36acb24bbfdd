"""Measure whether and how fast the demo learns, seed by seed, and how the monitor judges it.

    python bench/demo_learning.py [--seeds 0 1 2 3 4] [--environment NAME …] [--set FIELD=VALUE …]

For an environment other than `arithmetic`, the tiny model is first taught the form of its answers.
"""

import argparse
import collections

from table import show

from lachesis.base.timestamps import seconds_between
from lachesis.cli.commands import watch
from lachesis.config.launch_spec import LaunchSpec, parse_assignment
from lachesis.environment_catalog import lookup
from lachesis.monitor.learning_rules import judge_learning
from lachesis.monitor.run_history import RunFacts
from lachesis.operations.launches import start_run
from lachesis.operations.runs import get_results, read_metrics
from lachesis.prefect_client import background_serve, stop
from lachesis.runs.store import RunStore
from lachesis.tiny_model import build, teach


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--environment", nargs="+", default=["arithmetic"])
    parser.add_argument("--set", action="append", default=[], dest="edits", metavar="FIELD=VALUE")
    args = parser.parse_args()
    store = RunStore()
    edits = tuple(parse_assignment(text) for text in args.edits)
    columns = ["seed", "status", "reward first", "last", "held-out before", "after"]
    columns += ["training s", "s to 0.85", "run s", "learning judged"]
    for name in args.environment:
        model = (
            build.ensure_tiny_model(build.TinyModelRecipe())
            if name == "arithmetic"
            else teach.ensure_environment_model((lookup.find_environment(name), {}))
        )
        with background_serve.LauncherProcess():
            rows = [measure_learning(store, name, str(model), seed, edits) for seed in args.seeds]
        targets = (
            "first <= 0.35, last >= 0.85, training <= 180 s"
            if name == "arithmetic"
            else "reward up by 0.3, run <= 300 s"
        )
        show(f"learning {name} (targets: {targets}, never broken)", columns, rows)


def measure_learning(
    store: RunStore, name: str, model: str, seed: int, edits: tuple[tuple[str, str], ...] = ()
) -> list[object]:
    settings = {"data_seed": seed, **dict(edits)}
    spec = LaunchSpec(environment=name, settings=settings, model=model, seed=seed)
    record = start_run(store, spec)
    record = watch.watch_until_end(store, record.run_id, quiet=True)
    stop.wait_until_gone(store, record)
    results = get_results(store, record.run_id).to_payload()
    steps = read_metrics(store, record.run_id)
    facts = RunFacts(total_steps=record.total_steps)
    judgements = collections.Counter(
        judge_learning(steps[:end], facts=facts).word for end in range(1, len(steps) + 1)
    )
    good = next(
        (step["time"] - steps[0]["time"] for step in steps if step["reward/mean"] >= 0.85), None
    )
    return [
        seed,
        record.status,
        *(_format_value(results["reward"][name]) for name in ("first", "last")),
        *(_format_value(results["held_out"].get(name)) for name in ("before", "after")),
        f"{steps[-1]['time'] - steps[0]['time']:.0f}",
        "–" if good is None else f"{good:.0f}",
        f"{seconds_between(record.created_at, record.ended_at):.0f}",
        ", ".join(f"{word} {count}" for word, count in judgements.items()),
    ]


def _format_value(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
