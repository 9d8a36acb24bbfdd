"""Measure what an engine means by a loss and by an update, before anything is trained with it.

Servers that speak the same protocol divide losses by different numbers, and ignore settings without
a word. So they are asked, never judged by their name or version.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lachesis.base.arrays import Array
from lachesis.base.errors import ServerProtocolError
from lachesis.bridge.upstream import UpstreamClient
from lachesis.engine.protobuf_messages import DecodedDatum

# Ids that every vocabulary has; what they mean does not matter.
TEXT = np.arange(5, 22)
# Tokens of the text that are trained on, of 16.
NUM_TRAINED = 4
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
# A ratio that must be 1, 2 or 4 may be off by this share.
MAX_DEVIATION = 0.1


@dataclass(frozen=True)
class Semantics:
    """Say how an engine deviates from the protocol; the defaults are those of the protocol."""

    averages_batch: bool = False
    """Whether an update divides the gradient by the number of sequences."""
    averages_tokens: bool = False
    """Whether the loss of a sequence is divided by its number of tokens."""
    clips: bool = True
    """Whether grad_clip_norm changes an update."""
    is_measured: bool = False
    """Whether the engine reports the norm of the gradient, so that all this could be measured."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return asdict(self)


def find_grad_norm(metrics: dict[str, float]) -> float | None:
    """Return the norm of the gradient among an update's metrics, whatever its prefix."""
    for name, value in metrics.items():
        if name.rpartition("/")[2].partition(":")[0] == "grad_norm":
            return value
    return None


def measure_semantics(upstream: UpstreamClient, base_model: str, rank: int) -> Semantics:
    """Make a few passes over one text with a new adapter, and return what they tell.

    Raises:
        ServerProtocolError: The engine divides by something else than a number of sequences or
            tokens.
    """
    model_id = upstream.create_model(base_model, rank, seed=0)
    try:
        # First, because later updates would also follow the gradients before them.
        clips = _measure_clipping(upstream, model_id)
        whole, short = _make_datum(len(TEXT) - 1), _make_datum(NUM_TRAINED)
        single = _measure_norm(upstream, model_id, [whole])
        double = _measure_norm(upstream, model_id, [whole, whole])
        shorter = _measure_norm(upstream, model_id, [short])
        if not single or not double or not shorter:
            return Semantics(clips=clips)
        token_ratio = (len(TEXT) - 1) / NUM_TRAINED
        return Semantics(
            averages_batch=not _is_larger(double / single, 2.0, "for two equal datums"),
            averages_tokens=_is_larger(shorter / single, token_ratio, "without untrained tokens"),
            clips=clips,
            is_measured=True,
        )
    finally:
        upstream.unload_model(model_id)


def _is_larger(measured: float, ratio: float, reason: str) -> bool:
    """Return whether a measured ratio is `ratio` and not 1."""
    if abs(measured / ratio - 1.0) < MAX_DEVIATION:
        return True
    if abs(measured - 1.0) < MAX_DEVIATION:
        return False
    raise ServerProtocolError(
        f"the gradient of the engine is {measured:.3f} times as large {reason}; the bridge can use "
        f"engines where it is 1 or {ratio:g} times as large"
    )


def _make_datum(num_tokens: int) -> DecodedDatum:
    """Return a datum of the first tokens of the text, of which the same four are trained on."""
    advantages = np.zeros(num_tokens, np.float32)
    advantages[:NUM_TRAINED] = 1.0
    return DecodedDatum(
        TEXT[:num_tokens],
        {
            "target_tokens": TEXT[1 : num_tokens + 1],
            "advantages": advantages,
            "logprobs": np.zeros_like(advantages),
        },
    )


def _measure_norm(
    upstream: UpstreamClient, model_id: str, data: list[DecodedDatum]
) -> float | None:
    """Return the norm of the gradient of these datums, each in a pass of its own."""
    for datum in data:
        _run_pass(upstream, model_id, datum)
    return find_grad_norm(upstream.optim_step(model_id, {**ADAM, "learning_rate": 0.0}))


def _run_pass(upstream: UpstreamClient, model_id: str, datum: DecodedDatum) -> Array:
    result = upstream.run_pass(model_id, [datum], "importance_sampling", {}, forward_only=False)
    return result.outputs_D[0]["logprobs"]


def _measure_clipping(upstream: UpstreamClient, model_id: str) -> bool:
    """Return whether an update whose gradient is clipped to nearly nothing changes nothing."""
    datum = _make_datum(len(TEXT) - 1)
    before = _run_pass(upstream, model_id, datum)
    upstream.optim_step(model_id, {**ADAM, "grad_clip_norm": 1e-12})
    clipped = _run_pass(upstream, model_id, datum)
    upstream.optim_step(model_id, ADAM)
    free = _run_pass(upstream, model_id, datum)
    upstream.optim_step(model_id, {**ADAM, "learning_rate": 0.0})
    clipped_change = float(np.abs(clipped - before).max())
    return clipped_change < 0.5 * float(np.abs(free - clipped).max())
