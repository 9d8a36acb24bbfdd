"""Make an engine that averages losses compute the sums that the Tinker protocol means.

Such an engine divides the loss of a sequence by its number of tokens N, and the gradient of an
update by the number of sequences D that it has seen since the one before. Advantages that are
multiplied by N and D give the sums. D is known only when the last pass of an update has come, so
each further pass sends the earlier ones again for what they then lack.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lachesis.base.arrays import Array
from lachesis.base.errors import EngineRequestError, ServerProtocolError
from lachesis.skyrl_bridge.client import UpstreamClient
from lachesis.tinker_server.protobuf_messages import DecodedDatum

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

    def scale_data(self, semantics: "Semantics") -> list[DecodedDatum]:
        """Return the datums with advantages or weights of this scale."""
        return [self._scale(datum, semantics) for datum in self.data]

    def _scale(self, datum: DecodedDatum, semantics: "Semantics") -> DecodedDatum:
        num_tokens = len(datum.inputs["target_tokens"])
        factor = self.scale * (num_tokens if semantics.averages_tokens else 1)
        name = "weights" if self.loss_fn == "cross_entropy" else "advantages"
        weights = np.asarray(datum.inputs[name], np.float32)
        inputs = {**datum.inputs, name: weights * np.float32(factor)}
        return DecodedDatum(datum.tokens, inputs)

    def compute_loss_sum(
        self, token_losses_D: Sequence[np.ndarray], semantics: "Semantics"
    ) -> float:
        """Return the sum of the losses that the engine has computed from the scaled datums."""
        total = 0.0
        for losses in token_losses_D:
            factor = self.scale * (len(losses) if semantics.averages_tokens else 1)
            total += float(losses.sum(dtype=np.float64)) / factor
        return total


@dataclass
class GradientLedger:
    """Hold the passes of one adapter since its last update."""

    semantics: "Semantics"
    passes: list[ScaledPass] = field(default_factory=list)
    num_counted: int = 0
    """How many datums the engine divides the gradient by."""

    def plan(self, new: ScaledPass) -> list[ScaledPass]:
        """Return the passes, the new pass last, that together give the sum of the gradients."""
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
    semantics: "Semantics",
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
    """Return a datum whose inputs are complete and finite; raise EngineRequestError otherwise."""
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
    """Return a datum of cross-entropy as the datum of a policy loss with the same gradient."""
    weights = np.asarray(datum.inputs["weights"], np.float32)
    return DecodedDatum(
        datum.tokens,
        {
            "target_tokens": datum.inputs["target_tokens"],
            "advantages": weights,
            "logprobs": np.zeros_like(weights),
        },
    )


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
    """Make a few passes over one text with a new adapter, and return whether the engine averages.

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
