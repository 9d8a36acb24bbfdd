"""List the detectors that judge learning, each a pure function of a `RunHistory`.

A detector returns a `Finding`, or None. It reports `broken` only for what no healthy run shows:
weights that stay the same although the learning rate should change them, no gradient in thousands
of rollouts, a loss that is not a number, sampling and training log-probabilities that differ
grossly, or rollouts that nearly all fail.
"""

from __future__ import annotations

from collections.abc import Callable

from lachesis.monitor.reward_detectors import (
    find_environment_without_reward,
    find_flat_reward,
    find_generalization_gap,
    find_held_out_drop,
    find_reward_drop,
)
from lachesis.monitor.rollout_detectors import (
    find_dropped_rollouts,
    find_entropy_collapse,
    find_invalid_rollouts,
    find_length_drift,
    find_truncation,
    find_zero_signal,
)
from lachesis.monitor.run_history import Finding, RunHistory
from lachesis.monitor.weight_detectors import (
    find_logprob_gap,
    find_non_finite_loss,
    find_unchanged_weights,
)

# Causes before their effects: updates and rollouts that go wrong, the policy that they spoil, and
# the missing signal that follows.
DETECTORS: tuple[Callable[[RunHistory], Finding | None], ...] = (
    find_unchanged_weights,
    find_non_finite_loss,
    find_logprob_gap,
    find_invalid_rollouts,
    find_truncation,
    find_reward_drop,
    find_entropy_collapse,
    find_held_out_drop,
    find_environment_without_reward,
    find_zero_signal,
    find_dropped_rollouts,
    find_length_drift,
    find_generalization_gap,
    find_flat_reward,
)
