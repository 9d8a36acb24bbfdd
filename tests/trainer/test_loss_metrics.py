"""What a step tells about its loss, from log-probabilities of both sides."""

import math
from typing import Any

import numpy as np
import pytest

from lachesis.config import run_config as run_config
from lachesis.engine import losses
from lachesis.trainer.batch.group_to_datums import Batch, Datum
from lachesis.trainer.loss_metrics import RATIO_BOUNDS, compute_loss_metrics

RATIOS = [[0.5, 0.9, 1.1, 2.0], [5.0, 5.0]]
"""Of the trained tokens of two rollouts."""


def share(loss_fn, *, offpolicy=1, **bounds):
    """Return loss/clipped_share, or None where there is no such metric."""
    edits: dict[str, Any] = {
        "env": {"max_batches_offpolicy": offpolicy},
        "tinker": {"loss_fn": loss_fn, **bounds},
    }
    datums, training_D = [], []
    for ratios in RATIOS:
        count = len(ratios) + 1
        trained = np.array([False, *[True] * len(ratios)])
        logprobs = np.where(trained, -3.0, 0.0).astype(np.float32)
        ids, ones = np.arange(count), np.ones(count, np.float32)
        datums.append(Datum(ids, ids + 1, logprobs, ones, trained))
        training_D.append(np.array([-9.0, *(-3.0 + math.log(ratio) for ratio in ratios)]))
    metrics = compute_loss_metrics(
        Batch(datums),
        training_D,
        1.0,
        run_config.resolve_run_config("arithmetic", "embedded", edits),
    )
    return metrics.get("loss/clipped_share")


@pytest.mark.parametrize(
    ("loss_fn", "bounds", "expected"),
    [
        ("ppo", {}, 4 / 6),
        ("ppo", {"clip_low_threshold": 0.4}, 3 / 6),
        ("ppo", {"clip_high_threshold": 9.0}, 1 / 6),
        ("cispo", {}, 2 / 6),
        ("cispo", {"clip_high_threshold": 1.5}, 3 / 6),
        ("gspo", {}, 2 / 6),
        ("gspo", {"clip_low_threshold": 0.999}, 6 / 6),
        ("importance_sampling", {}, None),
        ("dro", {}, None),
    ],
)
def test_the_clipped_share_is_of_the_bounds_of_the_loss(loss_fn, bounds, expected):
    """For GSPO by the geometric mean of a rollout's ratios: that of the first is 0.99749…, that of
    the second 5.
    """
    assert share(loss_fn, **bounds) == expected


def test_the_loss_that_is_chosen_by_the_queue_decides():
    assert share("auto", offpolicy=1) is None
    assert share("auto", offpolicy=2) == 4 / 6


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_the_bounds_are_those_of_the_engine(loss_fn):
    settings = losses.LOSSES[loss_fn].default_settings
    assert RATIO_BOUNDS[loss_fn] == (
        settings["clip_low_threshold"],
        settings["clip_high_threshold"],
    )
    assert {
        name
        for name, loss in losses.LOSSES.items()
        if "clip_low_threshold" in loss.default_settings
    } == set(RATIO_BOUNDS)
