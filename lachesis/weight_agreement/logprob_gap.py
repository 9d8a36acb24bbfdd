"""Say how far log-probabilities of the same weights may differ, in nats per token.

Two programs that compute in float32 differ by rounding only, about 1e-6. In bfloat16, which keeps 8
bits of a number, the same weights give log-probabilities that differ by about 1e-2 on average, and
by several times as much on single tokens. A limit on the largest difference is therefore meaningful
in float32 only; elsewhere the mean is compared.
"""

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel


class Tolerance(BaseModel):
    """Limit the largest or the mean difference of a token's log-probabilities, in nats."""

    measure: Literal["largest", "mean"]
    limit: float


# Mean absolute difference of sampling and training log-probabilities in a step, in nats per token,
# from which on a run is suspect or broken. At 1, the ratio of the importance-sampling loss is wrong
# by a factor of e for a typical token.
SUSPECT_LOGPROB_GAP, BROKEN_LOGPROB_GAP = 0.25, 1.0
FLOAT32_TOLERANCE = Tolerance(measure="largest", limit=1e-3)
# The weight-sync check allows at least as much between sampler and trainer; see
# `lachesis.weight_agreement.at_weight_sync`.
BFLOAT16_TOLERANCE = Tolerance(measure="mean", limit=0.05)
# A difference of sampler and trainer was measured on one text; others may differ by this many
# times as much.
MEASURED_FACTOR = 3.0


def make_measured_tolerance(gaps: Sequence[float]) -> Tolerance | None:
    """Return the tolerance for a server whose precision was measured, or None without a measure.

    `gaps` are the mean differences of its sampler and its trainer, in nats per token.
    """
    finite_gaps = [gap for gap in gaps if math.isfinite(gap)]
    if not finite_gaps:
        return None
    return Tolerance(
        measure="mean", limit=max(FLOAT32_TOLERANCE.limit, MEASURED_FACTOR * max(finite_gaps))
    )


def get_profile_tolerance(profile: str) -> Tolerance:
    """Return the tolerance for weights trained on a profile and compared on this machine in
    float32.

    The embedded engine computes in float32. The precision of other servers is not known.
    """
    if profile == "embedded":
        return FLOAT32_TOLERANCE
    return BFLOAT16_TOLERANCE
