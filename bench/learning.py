"""Does the demo learn, for every seed, and how fast? What would the monitor have said of it after each step?

python bench/learning.py [--seeds 0 1 2 3 4]
"""

from __future__ import annotations

import argparse
import collections

from table import show

from lachesis import launcher, models
from lachesis.cli import watch
from lachesis.monitor.learning import judge
from lachesis.runs import seconds_between
from lachesis.service import Launch, Service


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    args = parser.parse_args()
    models.build(models.Recipe())
    service = Service()
    rows: list[list[object]] = []
    with launcher.Serving():
        for seed in args.seeds:
            record = service.start(Launch("arithmetic", edits=(("data_seed", seed),), seed=seed))
            record = watch.until_end(service, record.run_id, quiet=True)
            launcher.wait_gone(service.store, record)
            results = service.results(record.run_id).payload()
            steps = service.metrics(record.run_id)
            training = steps[-1]["time"] - steps[0]["time"]
            said = collections.Counter(judge(steps[:end]).word for end in range(1, len(steps) + 1))
            good = next((one["time"] - steps[0]["time"] for one in steps if one["reward/mean"] >= 0.85), None)
            rows.append(
                [
                    seed,
                    record.status,
                    results["reward"]["first"],
                    results["reward"]["last"],
                    results["held_out"].get("before"),
                    results["held_out"].get("after"),
                    f"{training:.0f}",
                    "–" if good is None else f"{good:.0f}",
                    f"{seconds_between(record.created_at, record.ended_at):.0f}",
                    ", ".join(f"{word} {count}" for word, count in said.items()),
                ]
            )
    columns = ["seed", "status", "reward first", "last", "held-out before", "after"]
    columns += ["training s", "s to 0.85", "run s", "learning judged"]
    show("learning (targets: first <= 0.35, last >= 0.85, training <= 180 s, never broken)", columns, rows)


if __name__ == "__main__":
    main()
