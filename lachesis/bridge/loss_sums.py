"""Make an engine that averages losses compute the sums that the Tinker protocol means.

Such an engine divides the loss of a sequence by its number of tokens N, and the gradient of an
update by the number of sequences D that it has seen since the one before. Advantages that are
multiplied by N and D give the sums. D is known only when the last pass of an update has come, so
each further pass sends the earlier ones again for what they then lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lachesis.base.errors import EngineRequestError
from lachesis.bridge.semantics import Semantics
from lachesis.engine.protobuf_messages import DecodedDatum

# What the protocol takes when a request leaves it out.
CISPO_BOUNDS = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
# Ratios that are clipped to 1 turn cispo into a weighted cross-entropy, whatever its weights.
CROSS_ENTROPY_BOUNDS = {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}
POLICY_LOSSES = ("importance_sampling", "ppo", "cispo")
ALLOWED_LOSSES = ("cross_entropy", *POLICY_LOSSES)


@dataclass
class ScaledPass:
    """Hold a pass as the engine gets it, and by what its gradient is too large in an average."""

    data: Sequence[DecodedDatum]
    loss_fn: str
    loss_config: dict[str, float]
    scale: float = 1.0

    def scale_data(self, semantics: Semantics) -> list[DecodedDatum]:
        """Return the datums with advantages or weights of this scale."""
        return [self._scale(datum, semantics) for datum in self.data]

    def _scale(self, datum: DecodedDatum, semantics: Semantics) -> DecodedDatum:
        num_tokens = len(datum.inputs["target_tokens"])
        factor = self.scale * (num_tokens if semantics.averages_tokens else 1)
        name = "weights" if self.loss_fn == "cross_entropy" else "advantages"
        weights = np.asarray(datum.inputs[name], np.float32)
        inputs = {**datum.inputs, name: weights * np.float32(factor)}
        return DecodedDatum(datum.tokens, inputs)

    def compute_loss_sum(self, token_losses_D: Sequence[np.ndarray], semantics: Semantics) -> float:
        """Return the sum of the losses that the engine has computed from the scaled datums."""
        total = 0.0
        for losses in token_losses_D:
            factor = self.scale * (len(losses) if semantics.averages_tokens else 1)
            total += float(losses.sum(dtype=np.float64)) / factor
        return total


@dataclass
class GradientLedger:
    """Hold the passes of one adapter since its last update."""

    semantics: Semantics
    passes: list[ScaledPass] = field(default_factory=list)
    num_counted: int = 0
    """How many datums the engine divides the gradient by."""

    def plan(self, new: ScaledPass) -> list[ScaledPass]:
        """Return the passes to make so that the gradient is the sum with a new pass, which is the
        last of them.
        """
        if not self.semantics.averages_batch:
            return [new]
        num_repeated = sum(len(earlier.data) for earlier in self.passes)
        count = self.num_counted + num_repeated + len(new.data)
        repeated = [
            ScaledPass(earlier.data, earlier.loss_fn, earlier.loss_config, count - earlier.scale)
            for earlier in self.passes
        ]
        new.scale = float(count)
        return [*repeated, new]

    def note(self, new: ScaledPass) -> None:
        """Note that the planned passes were made."""
        if not self.semantics.averages_batch:
            return
        self.num_counted += sum(len(earlier.data) for earlier in self.passes) + len(new.data)
        self.passes.append(new)
        for counted in self.passes:
            counted.scale = float(self.num_counted)

    def clear(self) -> None:
        """Note that an update was made."""
        self.passes, self.num_counted = [], 0


def make_pass(
    data: Sequence[DecodedDatum],
    loss_fn: str,
    loss_config: dict[str, float | str],
    semantics: Semantics,
) -> ScaledPass:
    """Return a client's pass in the terms of the engine.

    Raises:
        EngineRequestError: The engine has no such loss, or a datum lacks an input.
    """
    if loss_fn not in ALLOWED_LOSSES:
        raise EngineRequestError(
            f"loss_fn {loss_fn!r} is not offered by this engine; allowed: "
            f"{', '.join(ALLOWED_LOSSES)}"
        )
    checked = [_check_datum(number, datum, loss_fn) for number, datum in enumerate(data)]
    if not checked:
        raise EngineRequestError("the request has no datum; at least one is needed")
    config = {name: float(value) for name, value in loss_config.items()}
    if loss_fn == "cispo":
        config = {**CISPO_BOUNDS, **config}
    if loss_fn == "cross_entropy" and semantics.averages_tokens:
        return ScaledPass(
            [_to_policy_datum(datum) for datum in checked], "cispo", CROSS_ENTROPY_BOUNDS
        )
    return ScaledPass(checked, loss_fn, config)


def _check_datum(number: int, datum: DecodedDatum, loss_fn: str) -> DecodedDatum:
    num_tokens = len(datum.tokens)
    needed = ("logprobs", "advantages") if loss_fn in POLICY_LOSSES else ()
    inputs = dict(datum.inputs)
    if loss_fn == "cross_entropy":
        inputs.setdefault("weights", np.ones(num_tokens, np.float32))
    for name in ("target_tokens", *needed):
        if name not in inputs:
            raise EngineRequestError(f"datum {number} has no {name}, which {loss_fn} needs")
    for name, values in inputs.items():
        if values.shape != (num_tokens,):
            raise EngineRequestError(
                f"{name} of datum {number} has shape {values.shape}; this engine takes "
                f"({num_tokens},), one value for each token"
            )
        if not np.isfinite(values).all():
            raise EngineRequestError(f"{name} of datum {number} has a value that is not finite")
    names = {"target_tokens", *needed, *(() if needed else ("weights",))}
    kept = {name: values for name, values in inputs.items() if name in names}
    if needed:
        # Tokens that train nothing have padding as their log-probability, which must not overflow.
        kept["logprobs"] = np.where(kept["advantages"] != 0, kept["logprobs"], 0.0)
    return DecodedDatum(datum.tokens, kept)


def _to_policy_datum(datum: DecodedDatum) -> DecodedDatum:
    weights = np.asarray(datum.inputs["weights"], np.float32)
    return DecodedDatum(
        datum.tokens,
        {
            "target_tokens": datum.inputs["target_tokens"],
            "advantages": weights,
            "logprobs": np.zeros_like(weights),
        },
    )
