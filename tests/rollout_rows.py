"""Rollouts as a trainer writes them, for tests of those who read them."""

from __future__ import annotations

from typing import Any


def make_row(step: int, group: int, rollout: int, score: float, **changes: Any) -> dict[str, Any]:
    """Return one rollout with these values."""
    return {
        "step": step,
        "group": group,
        "rollout": rollout,
        "environment": "sums",
        "item_key": f"key{group}",
        "item": f'{{"question": "{group}+1="}}',
        "prompt": f"{group}+1=",
        "answer": str(score),
        "score": score,
        "parts": [("form", score / 2)],
        "advantage": score - 0.5,
        "outcome": "trained",
        "reason": None,
        "tokens": [1, 2, 3],
        "sampled": [False, False, True],
        "logprobs": [None, None, -0.5],
        "trained_logprobs": [None, None, -0.25],
        "weights_version": step - 1,
        **changes,
    }
