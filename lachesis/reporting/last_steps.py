"""Summarize the last steps of a run in the numbers that agents ask for: loss and accuracy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lachesis.base.json_text import Json
from lachesis.runs.held_out_results import HeldOutPoint, find_newest_accuracy
from lachesis.runs.metrics import Step

# Number of last steps whose rollouts make an accuracy, because one step has few prompts.
NUM_STEPS = 5


def summarize_last_steps(steps: Sequence[Step], curve: Sequence[HeldOutPoint]) -> Json:
    """Return `loss`, `accuracy` and `accuracy_source`; all are known after a step."""
    if not steps:
        return {"loss": None, "accuracy": None, "accuracy_source": None}
    losses = [step["train/loss"] for step in steps if step.get("train/loss") is not None]
    accuracy = find_newest_accuracy(curve)
    source = "held-out items"
    if accuracy is None:
        shares = [step.get("train/percent_correct") for step in steps[-NUM_STEPS:]]
        known_shares = [share for share in shares if share is not None]
        accuracy = round(statistics.fmean(known_shares), 4) if known_shares else None
        source = "rollouts of training"
    # Steps whose groups have equal rewards have no loss.
    return {
        "loss": losses[-1] if losses else 0.0,
        "accuracy": accuracy,
        "accuracy_source": source if accuracy is not None else None,
    }
