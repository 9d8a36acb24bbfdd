"""What two distances say about exported weights: theirs and the base model's from what the server
computed."""

import math

import pytest

from lachesis.weight_agreement.logprob_gap import BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE
from lachesis.weight_agreement.parity import _read_revision, judge_weights


@pytest.mark.parametrize(
    ("tolerance", "largest", "mean", "base_mean", "verified"),
    [
        (BFLOAT16_TOLERANCE, 0.2, 0.01, 0.4, True),
        (BFLOAT16_TOLERANCE, 0.2, 0.01, 0.02, True),
        (BFLOAT16_TOLERANCE, 0.2, 0.03, 0.04, None),
        (BFLOAT16_TOLERANCE, 0.2, 0.04, 0.04, None),
        (BFLOAT16_TOLERANCE, 0.2, 0.011, 0.01, None),
        (BFLOAT16_TOLERANCE, 0.2, 0.04, 0.02, False),
        (BFLOAT16_TOLERANCE, 0.2, 0.06, 0.4, False),
        (BFLOAT16_TOLERANCE, 0.2, 0.06, 0.06, False),
        (BFLOAT16_TOLERANCE, math.nan, math.nan, 0.4, False),
        (BFLOAT16_TOLERANCE, 0.2, 0.01, math.nan, False),
        (FLOAT32_TOLERANCE, 1e-5, 1e-6, 0.1, True),
        (FLOAT32_TOLERANCE, 1e-5, 1e-6, 1e-6, None),
        (FLOAT32_TOLERANCE, 2e-3, 1e-6, 0.1, False),
        (FLOAT32_TOLERANCE, math.nan, math.nan, 0.1, False),
    ],
)
def test_weights_are_verified_only_where_they_differ_from_the_base_model(
    tolerance, largest, mean, base_mean, verified
):
    assert judge_weights(largest, mean, base_mean, tolerance) is verified


def test_models_with_other_weights_have_another_revision(tmp_path):
    """Older folders hold `pytorch_model.bin` and no safetensors."""
    revisions = set()
    for name, file in (
        ("a", "model.safetensors"),
        ("b", "pytorch_model.bin"),
        ("c", "pytorch_model.bin"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(name)
        revisions.add(_read_revision(str(tmp_path / name), object()))
    assert len(revisions) == 3
    (tmp_path / "d").mkdir()
    assert _read_revision(str(tmp_path / "d"), object()) == "unknown"
