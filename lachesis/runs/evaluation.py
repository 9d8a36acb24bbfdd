"""Read the results of Atropos' `evaluate` command."""

from __future__ import annotations

import json
from pathlib import Path

from lachesis.base.errors import RunStateError, shorten
from lachesis.base.numbers import is_score


def read_evaluation(folder: Path) -> dict[str, float]:
    """Return the metrics in `folder`/metrics.json, except values that are not finite numbers.

    Raises:
        RunStateError: The environment wrote no number.
    """
    file = folder / "metrics.json"
    try:
        metrics = dict(json.loads(file.read_text())["results"]["all"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunStateError(
            f"{file} has no evaluation ({type(error).__name__}); the environment's evaluate() must "
            "return its metrics or call evaluate_log(metrics)"
        ) from error
    numbers = {
        key: float(value)
        for key, value in metrics.items()
        if isinstance(value, int | float) and is_score(value)
    }
    if not numbers:
        raise RunStateError(
            f"the evaluation has no metric that is a finite number: {shorten(repr(metrics))}"
        )
    return numbers
