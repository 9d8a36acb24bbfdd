"""Runs of many kinds on disk, as a training leaves them, for tests of what shows a run.

A `Recipe` says what a run has made, step by step; `record_run` writes its record, its metrics, its
checkpoints and the weights that they name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from lachesis.base.files import write_private
from lachesis.checkpoints.manifests import HeldOutResult, Manifest
from lachesis.config.run_config import resolve_run_config
from lachesis.runs.end_causes import EndCause
from lachesis.runs.folder import RunDir
from lachesis.runs.record import AdditionalEnvironment, PastAttempt, RunRecord, ServiceRecord
from lachesis.runs.store import RunStore
from tests.harness.home import make_record

BEGAN_AT = datetime(2026, 11, 1, 12, tzinfo=UTC)
STEP_S = 2.0
# Characters that a terminal, a page and Markdown would each obey.
HOSTILE = "<script>document.title='x'</script>\x1b[1A\x1b[2K\x1b]52;c;eA==\x07|`a`|[b](c)\u202e"


@dataclass(frozen=True)
class HeldOut:
    """Hold what the weights of one step reach on held-out items."""

    step: int
    share: float
    items: int | None


@dataclass(frozen=True)
class Recipe:
    """Say what a run has made."""

    run_id: str
    rewards: Sequence[float | None]
    """The mean reward of each step, from step 1 on."""
    held_out: Sequence[HeldOut] = ()
    checkpoints: Sequence[int] = ()
    """The steps whose weights are kept."""
    usd_per_step: float | None = None
    final_tokens: int = 0
    """Tokens that an evaluation after the last step has sampled, at 1e-6 US dollars each."""
    forecast: Mapping[str, Any] | None = None
    health: Mapping[str, Any] = field(default_factory=lambda: judge("healthy", "the reward rises"))
    step_metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics, the same in each step."""
    other_held_out: Mapping[str, Sequence[HeldOut]] = field(default_factory=dict)
    """Held-out results of the further environments, by name."""
    repeated_steps: int = 0
    """The steps that were made again after a resume, with a reward of 9 the first time."""
    lost_steps: int = 0
    """Steps after the last checkpoint, which a resume makes again; it has made none of them yet."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the record."""

    @property
    def verdict(self) -> str:
        """Return the word for the run; one that failed before it was judged has failed."""
        word = str(self.health["word"])
        is_failed = self.changes.get("status") == "failed" and word in ("unknown", "too early")
        return "failed" if is_failed else word


def judge(word: str, *evidence: str) -> dict[str, Any]:
    """Return the last judgement of a run that has ended."""
    return {"word": word, "evidence": list(evidence), "advice": [], "final": True}


def record_run(store: RunStore, recipe: Recipe) -> RunRecord:
    """Write a run to a home and return its record."""
    config = resolve_run_config("sums", "embedded", {}, model="m")
    num_steps = len(recipe.rewards)
    took_s = num_steps * STEP_S + 10
    values: dict[str, Any] = {
        "status": "completed",
        "phase": "completed",
        "end_cause": EndCause.COMPLETED,
        "total_steps": max(1, num_steps),
        "batch_size": config.env.batch_size,
        "services": {"trainer": ServiceRecord(log="trainer.log", state="exited (0)")},
        "created_at": BEGAN_AT.isoformat(),
        "queued_at": BEGAN_AT.isoformat(),
        "started_at": BEGAN_AT.isoformat(),
        "ended_at": (BEGAN_AT + timedelta(seconds=took_s)).isoformat(),
        "attempt_duration_s": took_s,
        "forecast": dict(recipe.forecast) if recipe.forecast else None,
        "health": dict(recipe.health),
        "is_end_handled": True,
    }
    record = make_record(run_id=recipe.run_id, **{**values, **recipe.changes})
    run_dir = store.create(record, config.to_yaml())
    lines = _make_lines(recipe)
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    if lines:
        write_private(run_dir.metrics, text)
    run_dir.get_log_file("trainer").write_text("the last line of the trainer\n")
    if recipe.final_tokens:
        write_private(run_dir.spent, json.dumps(_count_spent(recipe)))
    for step in recipe.checkpoints:
        _write_checkpoint(run_dir, recipe, step)
    return store.load(recipe.run_id)


def _make_lines(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the lines of the metrics in the order in which they were written."""
    lines = [_make_line(recipe, step) for step in range(1, len(recipe.rewards) + 1)]
    last = lines[-1] if lines else {}
    lines += [{**last, "step": last["step"] + 1 + lost, "reward/mean": 9.0} for lost in
              range(recipe.lost_steps)]  # fmt: skip
    if not recipe.repeated_steps:
        return lines
    kept = len(lines) - recipe.repeated_steps
    lost = [{**line, "reward/mean": 9.0} for line in lines[kept : kept + 3]]
    return [*lines[:kept], *lost, *lines[kept:]]


def _make_line(recipe: Recipe, step: int) -> dict[str, Any]:
    line: dict[str, Any] = {
        "step": step,
        "time": BEGAN_AT.timestamp() + 10 + step * STEP_S,
        "reward/mean": recipe.rewards[step - 1],
        "train/percent_correct": 0.5,
        "train/learning_rate": 0.001,
        "time/step": STEP_S,
        "time/rollouts": 1.2,
        "time/train": 0.6,
        "tokens/prefill_total": step * 1000,
        "tokens/sampled_total": step * 2000,
        "tokens/trained_total": step * 3000,
        **recipe.step_metrics,
    }
    if recipe.usd_per_step is not None:
        line["cost/step"] = recipe.usd_per_step
        line["cost/total"] = round(step * recipe.usd_per_step, 6)
    for name, results in {"": recipe.held_out, **recipe.other_held_out}.items():
        prefix = f"environments/{name}/eval" if name else "eval"
        for result in results:
            if max(1, result.step) == step:
                line |= {f"{prefix}/step": result.step, f"{prefix}/percent_correct": result.share}
                if result.items is not None:
                    line[f"{prefix}/items"] = float(result.items)
    return line


def _count_spent(recipe: Recipe) -> dict[str, float]:
    """Return the usage of the whole run, as the trainer writes it at its end."""
    num_steps = len(recipe.rewards)
    return {
        "prefill": 1000 * num_steps,
        "sampled": 2000 * num_steps + recipe.final_tokens,
        "trained": 3000 * num_steps,
        "cost_usd": num_steps * (recipe.usd_per_step or 0) + 1e-6 * recipe.final_tokens,
    }


def _write_checkpoint(run_dir: RunDir, recipe: Recipe, step: int) -> None:
    earlier = max((other for other in recipe.checkpoints if other < step), default=0)
    rewards = [reward for reward in recipe.rewards[earlier:step] if reward is not None]
    results = [result for result in recipe.held_out if earlier < result.step <= step]
    manifest = Manifest(
        step=step,
        state=f"tinker://{recipe.run_id}/weights/{step}",
        sampler_weights=f"tinker://{recipe.run_id}/sampler_weights/{step}",
        is_final=step == len(recipe.rewards),
        reward=sum(rewards) / len(rewards) if rewards else None,
        held_out=HeldOutResult(
            percent_correct=results[-1].share, items=results[-1].items, step=results[-1].step
        )
        if results
        else None,
    )
    run_dir.checkpoints.mkdir(exist_ok=True)
    write_private(run_dir.checkpoints / f"step-{step}.json", manifest.model_dump_json())


def make_forecast(num_steps: int) -> dict[str, Any]:
    """Return the forecast of a run that takes 6,600 tokens and 2.2 s a step."""
    tokens, hours, cost = 6600.0 * num_steps, 2.2 * num_steps / 3600, 0.002 * num_steps
    per_rollout = {"prefill": 10.0, "sampled": 20.0, "trained": 36.0}
    return {
        "planned": {
            "total_steps": num_steps,
            "batch_size": 100,
            "group_size": 4,
            "base_model": "m",
            "profile": "embedded",
        },
        "tokens_per_rollout": per_rollout,
        "tokens": {"low": tokens * 0.8, "expected": tokens, "high": tokens * 1.2},
        "hours": {"low": hours * 0.5, "expected": hours, "high": hours * 2},
        "cost_usd": {"low": cost * 0.8, "expected": cost, "high": cost * 1.2},
        "basis": "8 groups of an inference test",
    }


def _alternate(first: float, last: float, num_steps: int) -> list[float]:
    """Return rewards that rise from `first` to `last` and swing by 0.05 around that line."""
    rise = (last - first) / max(1, num_steps - 1)
    return [
        round(first + rise * step + (0.05 if step % 2 else -0.05), 6) for step in range(num_steps)
    ]


def _make_rare_successes(num_steps: int) -> list[float]:
    """Return rewards of 0 or 1, of which one in ten is 1, as with one group a step."""
    return [1.0 if step * 7919 % 10 == 3 else 0.0 for step in range(num_steps)]


def _make_two_attempts() -> dict[str, Any]:
    """Return the fields of a run that was resumed on other data."""
    first = PastAttempt(
        attempt=1,
        started_at=BEGAN_AT.isoformat(),
        duration_s=40.0,
        first_step=1,
        last_step=11,
        status="failed",
        cause=EndCause.FAILED,
        reason="the engine ended",
    )
    return {
        "attempt": 2,
        "past_attempts": [first],
        "earlier_hours": 40 / 3600,
        "resumed": {"step": 8},
        "resume_changes": {"env.dataset": "other.jsonl"},
    }


# Ten kinds of runs. A surface that shows one of them shows all.
RECIPES = {
    "rewards of 0 and 1": Recipe(
        "aaaa0001",
        _alternate(0.1, 0.9, 20),
        held_out=[HeldOut(0, 0.1, 20), HeldOut(10, 0.95, 20), HeldOut(20, 0.9, 20)],
        checkpoints=[10, 20],
    ),
    "partial rewards": Recipe(
        "aaaa0002",
        _alternate(0.31, 0.58, 30),
        held_out=[HeldOut(0, 0.5, 100), HeldOut(30, 0.65, 100)],
        checkpoints=[15, 30],
        usd_per_step=0.0021,
        final_tokens=21_500,
        forecast=make_forecast(30),
        changes={"profile": "tinker", "base_model": "Qwen/Qwen3-8B"},
    ),
    "negative rewards": Recipe(
        "aaaa0003",
        _alternate(-0.9, -0.2, 12),
        held_out=[HeldOut(0, 0.0, 40), HeldOut(12, 0.05, 40)],
        checkpoints=[12],
        health=judge("not learning", "no held-out rise"),
    ),
    "12,000 steps": Recipe(
        "aaaa0004",
        _make_rare_successes(12_000),
        held_out=[HeldOut(0, 0.1, 1000), HeldOut(11_000, 0.104, 1000)],
        checkpoints=[6000, 12_000],
        health=judge("not learning", "the reward stays"),
    ),
    "missing values": Recipe(
        "aaaa0005",
        [None, 0.2, None, 0.4, 0.8, None, 0.8, None, 0.8, None],
        held_out=[HeldOut(0, 0.25, None), HeldOut(10, 0.5, None)],
        health=judge("suspect", "5 of 10 steps have no reward"),
    ),
    "no held-out items": Recipe(
        "aaaa0006", _alternate(0.2, 0.7, 16), checkpoints=[8, 16], forecast=make_forecast(16)
    ),
    "resumed on other data": Recipe(
        "aaaa0007",
        _alternate(0.2, 0.6, 18),
        held_out=[HeldOut(0, 0.2, 50), HeldOut(18, 0.6, 50)],
        checkpoints=[8, 18],
        repeated_steps=10,
        changes=_make_two_attempts(),
    ),
    "two environments": Recipe(
        "aaaa0008",
        _alternate(0.3, 0.6, 14),
        held_out=[HeldOut(0, 0.3, 30), HeldOut(14, 0.6, 30)],
        other_held_out={"words": [HeldOut(0, 0.1, 60), HeldOut(14, 0.2, 60)]},
        checkpoints=[14],
        step_metrics={
            "environments/sums/reward_mean": 0.7,
            "environments/words/reward_mean": 0.2,
            "environments/sums/rollouts": 32,
            "environments/words/rollouts": 32,
        },
        changes={
            "additional_environments": {
                "words": AdditionalEnvironment(environment_file="words.py", fingerprint="b")
            }
        },
    ),
    "failed at start": Recipe(
        "aaaa0009",
        [],
        health=judge("unknown"),
        changes={
            "status": "failed",
            "phase": "failed",
            "total_steps": 10,
            "end_cause": EndCause.FAILED,
            "error": "the engine ended with code 1: no memory is left",
            "failed_service": "trainer",
            "attempt_duration_s": 3.0,
        },
    ),
    "hostile texts": Recipe(
        "aaaa000a",
        _alternate(0.1, 0.2, 10),
        held_out=[HeldOut(0, 0.2, 10)],
        checkpoints=[5],
        health=judge("suspect", f"an answer was {HOSTILE}"),
        changes={
            "status": "failed",
            "phase": "failed",
            "total_steps": 40,
            "end_cause": EndCause.FAILED,
            "name": "hostile",
            "note": HOSTILE.replace("\x1b", "").replace("\x07", "").replace("\u202e", ""),
            "error": f"ValueError: {HOSTILE}",
            "failed_service": "trainer",
        },
    ),
    # Further kinds, which were added after the surfaces had been made to agree.
    "rewards above 1": Recipe(
        "aaaa000b",
        _alternate(1.5, 12.25, 24),
        held_out=[HeldOut(0, 0.4, 64), HeldOut(24, 0.55, 64)],
        checkpoints=[12, 24],
        usd_per_step=0.35,
        changes={"profile": "tinker", "base_model": "Qwen/Qwen3-8B"},
    ),
    "two attempts, then stopped": Recipe(
        "aaaa000c",
        _alternate(0.35, 0.3, 9),
        held_out=[HeldOut(0, 0.35, 200), HeldOut(8, 0.2, 200)],
        checkpoints=[4, 8],
        repeated_steps=5,
        health=judge("broken", "the mean reward fell"),
        changes={
            **_make_two_attempts(),
            "status": "stopped",
            "phase": "stopped",
            "end_cause": EndCause.BROKEN_LEARNING,
            "error": "its learning was broken",
            "total_steps": 90,
        },
    ),
    "resumed and failed before a step": Recipe(
        "aaaa000d",
        _alternate(0.1, 0.5, 8),
        held_out=[HeldOut(0, 0.1, 30), HeldOut(8, 0.5, 30)],
        checkpoints=[4, 8],
        lost_steps=4,
        health=judge("too early", "8 of at least 20 steps"),
        changes={
            **_make_two_attempts(),
            "queued_at": (BEGAN_AT + timedelta(hours=1)).isoformat(),
            "status": "failed",
            "phase": "failed",
            "end_cause": EndCause.FAILED,
            "failed_service": "trainer",
            "error": "the engine ended",
            "total_steps": 90,
        },
    ),
}
