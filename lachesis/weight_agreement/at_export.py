"""Verify exported weights by loading them here, or by the server that has trained them."""

from pathlib import Path
from typing import Any

from lachesis.base.errors import CheckpointError
from lachesis.checkpoints.manifests import Manifest
from lachesis.models.find_model import is_cached
from lachesis.runs.folder import RunDir
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import RunRecord
from lachesis.weight_agreement import at_resume
from lachesis.weight_agreement.logprob_gap import (
    Tolerance,
    get_profile_tolerance,
    make_measured_tolerance,
)
from lachesis.weight_agreement.parity import Parity, check_adapter

# The subfolder of the merged model, and the file of the adapter's tensors.
MERGED_FOLDER = "merged"
TENSORS_FILE = "adapter_model.safetensors"


def measure_tolerance(record: RunRecord, run_dir: RunDir) -> Tolerance:
    """Return the tolerance for a comparison by the run's server itself.

    It is what the checks of the run have measured between sampler and trainer, or else that of the
    profile.
    """
    gaps = [
        float(step["weights/sampler_gap"])
        for step in MetricsFile(run_dir.metrics).read()
        if step.get("weights/sampler_gap") is not None
    ]
    return make_measured_tolerance(gaps) or get_profile_tolerance(record.profile)


def choose_tolerance(record: RunRecord, run_dir: RunDir) -> Tolerance:
    """Return the tolerance for a comparison on this machine.

    A server whose sampler and trainer round alike shows no difference between them, and yet differs
    from this machine. So what was measured only raises the limit of the profile.
    """
    usual = get_profile_tolerance(record.profile)
    if record.profile == "embedded":
        return usual
    return max(usual, measure_tolerance(record, run_dir), key=lambda tolerance: tolerance.limit)


def _verify_on_server(
    record: RunRecord, run_dir: RunDir, staging_folder: Path, manifest: Manifest
) -> dict[str, Any]:
    """Compare the checkpoint by its server, where the base model is not on this machine."""
    _require_readable(staging_folder)
    texts = [(probe.tokens, probe.logprobs) for probe in manifest.probes]
    result = at_resume.check_on_server(
        record.base_model, manifest.sampler_weights, texts, measure_tolerance(record, run_dir)
    )
    _require_trained(record, manifest, {"parity": result})
    return {"verified_by": "server", "parity": result.model_dump(), "verified": result.verified}


def _require_readable(folder: Path) -> None:
    """Raise CheckpointError unless the downloaded file holds tensors of an adapter."""
    from safetensors import SafetensorError, safe_open

    file = folder / TENSORS_FILE
    try:
        with safe_open(file, framework="numpy") as tensors:
            names = list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file.name} was not downloaded completely: {error}") from error
    if not names:
        raise CheckpointError(f"{file.name} holds no tensors")


def verify_weights(
    record: RunRecord, run_dir: RunDir, staging_folder: Path, manifest: Manifest, *, merged: bool
) -> dict[str, Any]:
    """Compare the weights in `staging_folder` with log-probabilities of the trained model.

    Returns:
        What has compared them, the measured differences, and `verified`: True, or None if the
        weights cannot be distinguished from those of the base model.

    Raises:
        CheckpointError: The weights are not those that were trained.
    """
    is_base_here = Path(record.base_model).is_dir() or is_cached(record.base_model)
    if not merged and not is_base_here and record.profile != "embedded":
        return _verify_on_server(record, run_dir, staging_folder, manifest)
    texts = [(probe.tokens, probe.logprobs) for probe in manifest.probes]
    merged_folder = staging_folder / MERGED_FOLDER if merged else None
    tolerance = choose_tolerance(record, run_dir)
    adapter_parity, merged_parity, revision = check_adapter(
        record.base_model, staging_folder, texts, merged_folder, tolerance
    )
    results = {"parity": adapter_parity}
    if merged_parity:
        results["parity_merged"] = merged_parity
    _require_trained(record, manifest, results)
    verified = None if any(result.verified is None for result in results.values()) else True
    measured = {name: result.model_dump() for name, result in results.items()}
    return {
        "verified_by": "this machine",
        "base_revision": revision,
        **measured,
        "verified": verified,
    }


def _require_trained(record: RunRecord, manifest: Manifest, results: dict[str, Parity]) -> None:
    """Raise CheckpointError for weights that are not those that were trained."""
    for name, result in results.items():
        if result.verified is False:
            what = "adapter" if name == "parity" else "merged model"
            raise CheckpointError(
                f"the {what} of step {manifest.step} differs from the trained weights: "
                f"{result.describe()}. Nothing was written; `lachesis export {record.run_id} "
                f"--checkpoint {manifest.step} --to DIR --no-verify` writes it without this check"
            )
