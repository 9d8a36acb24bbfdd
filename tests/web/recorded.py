"""A home with a few recorded runs, for tests of the pages that show them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lachesis.rollouts.parquet_files import RolloutFolder
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import ServiceRecord
from lachesis.runs.store import RunStore
from tests.harness.home import make_row, write_run

BEST, SLOW, LIVING, FAILED = "aaaa0001", "bbbb0002", "cccc0003", "dddd0004"
SCRIPT = "<script>document.title='hacked'</script>"


def add_run(store: RunStore, run_id: str, rewards: Sequence[float], **changes: Any) -> None:
    """Create a run with a configuration, a line of metrics per reward, and a log."""
    edits = {"tinker": changes.pop("tinker", {}), "env": changes.pop("env", {})}
    values: dict[str, Any] = {
        "status": "completed",
        "total_steps": max(1, len(rewards)),
        "services": {"trainer": ServiceRecord(log="trainer.log", state="exited (0)")},
        "started_at": "2026-01-01T00:00:00+00:00",
        "ended_at": "2026-01-01T00:01:00+00:00",
        "attempt_duration_s": 60.0,
    }
    steps = [make_metrics(step, reward) for step, reward in enumerate(rewards, 1)]
    write_run(store, steps, edits=edits, run_id=run_id, **{**values, **changes})
    log = store.dir(run_id).get_log_file("trainer")
    log.write_text(f"step 1 reward 0.1\nValueError: {SCRIPT}\n")


def make_metrics(step: int, reward: float) -> dict[str, float]:
    """Return some metrics of one step."""
    return {
        "reward/mean": reward,
        "entropy/sampling": 1.0 / step,
        "train/learning_rate": 0.001,
        "time/step": 0.5,
        "time/rollouts": 0.3,
        "time/train": 0.2,
        "tokens/prefill_total": step * 10,
        "tokens/sampled_total": step * 20,
        "tokens/trained_total": step * 30,
    }


def add_held_out(store: RunStore, run_id: str, before: float, after: float) -> None:
    """Add held-out results on 20 items before and after training."""
    metrics = MetricsFile(store.dir(run_id).metrics)
    for step, share in ((0, before), (metrics.read()[-1]["step"], after)):
        metrics.add_evaluation(
            {"eval/step": step, "eval/percent_correct": share, "eval/items": 20.0}
        )


def fill_home(home: Path) -> RunStore:
    """Return the runs of a home: a good one, a slow one, one that lives, and one that failed."""
    store = RunStore(home)
    healthy = {"word": "healthy", "evidence": ["mean reward 0.9"], "advice": [], "final": True}
    add_run(
        store, BEST, [0.1, 0.3, 0.8, 0.9], health=healthy, tags=["night"],
        created_at="2026-01-04T00:00:00+00:00",
    )  # fmt: skip
    flat = {"word": "not learning", "evidence": ["no rise"], "advice": ["wait"], "final": True}
    add_run(
        store, SLOW, [0.1, 0.1, 0.1, 0.1], health=flat, tinker={"learning_rate": 0.00004},
        created_at="2026-01-03T00:00:00+00:00",
    )  # fmt: skip
    add_run(
        store, LIVING, [0.2, 0.2], status="running", phase="training", total_steps=10,
        ended_at=None, attempt_duration_s=None, name=SCRIPT, created_at="2026-01-02T00:00:00+00:00",
    )  # fmt: skip
    add_run(
        store, FAILED, [], status="failed", error=f"it raised {SCRIPT}", total_steps=4,
        health={"word": "unknown", "evidence": [], "advice": [], "final": True},
        created_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    add_held_out(store, BEST, 0.1, 0.95)
    add_held_out(store, SLOW, 0.1, 0.15)
    rows = [make_row(step, 0, place, float(place % 2)) for step in (1, 4) for place in range(4)]
    rows[0] |= {"answer": SCRIPT, "reason": SCRIPT}
    RolloutFolder(store.dir(BEST).rollouts, 10**9).append(rows)
    return store


ADDRESS = "http://localhost:8070"
PAGES = (
    "/runs",
    f"/runs/{BEST}",
    f"/runs/{SLOW}",
    f"/runs/{LIVING}",
    f"/runs/{FAILED}",
    f"/runs/{BEST}/rollouts",
    f"/runs/{BEST}/rollouts?ask=wrong&group=4-0",
    f"/runs/{FAILED}/rollouts",
    f"/runs/{BEST}/metrics",
    f"/runs/{BEST}/settings",
    f"/runs/{BEST}/logs",
    f"/runs/{BEST}/logs/trainer?q=reward",
    f"/compare?runs={BEST},{SLOW}",
    f"/compare?runs={BEST}&runs={SLOW}&all=1",
)
