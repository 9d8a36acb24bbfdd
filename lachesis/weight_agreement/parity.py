"""Decide whether exported weights are the trained ones.

They are loaded with `transformers` and `peft`, and their log-probabilities of some texts are
compared with those that the training server computed.
"""

import contextlib
import hashlib
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from lachesis.base.errors import CheckpointError, make_embedded_error
from lachesis.weight_agreement.logprob_gap import FLOAT32_TOLERANCE, Tolerance

# The trained weights may be this many times farther from the server's values than the base model.
#
# If training has changed little, the server's rounding decides which of them is nearer.
MAX_RATIO_TO_BASE = 1.25
# Weights are verified if their mean difference is at most this share of that of the base model.
#
# Otherwise the difference may be rounding, or an adapter of a much earlier step.
MAX_RATIO_VERIFIED = 0.5
# A server with this tolerance or a larger one computes in bfloat16.
MIN_ROUNDED_LIMIT = 0.01


class Parity(BaseModel):
    """Hold two paths' differences of log-probabilities, in nats, for the same weights."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    texts: int
    tokens: int
    largest: float
    mean: float
    base_mean: float | None = None
    """Mean difference of the base model without the trained weights."""
    measure: Literal["largest", "mean"] = "largest"
    """Which difference must be within the limit."""
    limit: float = FLOAT32_TOLERANCE.limit
    verified: bool | None
    """True for the trained weights, false for others, and null if the comparison cannot tell: the
    difference is within the limit, but not clearly below that of the base model."""

    @property
    def verdict(self) -> str:
        """Say whether these are the trained weights."""
        if self.verified is None:
            return "not verified, because the base model differs less than twice as much"
        if self.verified:
            return "verified"
        return "not the trained weights"

    def describe(self) -> str:
        """Describe the measured differences and the limit."""
        limit = f" (allowed: {self.limit:g})"
        text = (
            f"log-probabilities of {self.tokens} tokens differ by {self.mean:.1e} nats on average"
            f"{limit if self.measure == 'mean' else ''} and by {self.largest:.1e} at most"
            f"{limit if self.measure == 'largest' else ''}"
        )
        if self.base_mean is None:
            return text
        return f"{text}; those of the base model by {self.base_mean:.1e} on average"


# Token ids (T,), and the log-probabilities (T - 1,) of all but the first.
Texts = Sequence[tuple[list[int], list[float]]]


def check_adapter(
    base_model: str,
    adapter: Path,
    texts: Texts,
    merged: Path | None,
    tolerance: Tolerance = FLOAT32_TOLERANCE,
) -> tuple[Parity, Parity | None, str]:
    """Compare the adapter on its base model, and the merged model if a folder for it is given.

    The merged model is written to the folder `merged` and loaded from there.

    Returns:
        The parity of the adapter, that of the merged model or None, and the revision of the base
            model.

    Raises:
        MissingDependencyError: A package is not installed.
        CheckpointError: Something cannot be loaded, or there is no text to compare.
    """
    if not any(logprobs for _, logprobs in texts):
        raise CheckpointError("the checkpoint has no text to compare with; it cannot be verified")
    try:
        with _quiet_libraries():
            return _compare_adapter(base_model, adapter, texts, merged, tolerance)
    except ImportError as error:
        raise make_embedded_error("comparing", str(error.name)) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the weights in {adapter} cannot be loaded on {base_model}: {error}"
        ) from error


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Hide bars and warnings that tell a user nothing about the weights."""
    import transformers

    had_bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(category=FutureWarning, action="ignore"):
            yield
    finally:
        if had_bars:
            transformers.utils.logging.enable_progress_bar()


def _compare_adapter(
    base_model: str, adapter: Path, texts: Texts, merged: Path | None, tolerance: Tolerance
) -> tuple[Parity, Parity | None, str]:
    """Compare adapter and merged model with the texts, and return the base model's revision too."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Against a server that rounds to bfloat16, half of the memory compares as well.
    is_rounded = tolerance.limit >= MIN_ROUNDED_LIMIT and merged is None
    dtype = torch.bfloat16 if is_rounded else torch.float32
    base = AutoModelForCausalLM.from_pretrained(base_model, dtype=dtype)
    revision = _read_revision(base_model, base.config)
    _untie_embeddings(base)
    model = PeftModel.from_pretrained(base, str(adapter)).eval()
    with model.disable_adapter():
        base_differences = _compute_differences(model, texts)
    base_mean = sum(base_differences) / len(base_differences)
    adapter_parity = build_parity(_compute_differences(model, texts), base_mean, texts, tolerance)
    if merged is None:
        return adapter_parity, None, revision
    # Merging changes `model`, so the adapter had to be compared before.
    model.merge_and_unload().save_pretrained(merged)
    AutoTokenizer.from_pretrained(base_model).save_pretrained(merged)
    merged_model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    merged_differences = _compute_differences(merged_model, texts)
    merged_parity = build_parity(merged_differences, base_mean, texts, tolerance)
    return adapter_parity, merged_parity, revision


def _untie_embeddings(model: Any) -> None:
    """Give the output layer its own weights, so that its adapter does not change the embedding."""
    import torch

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.get_text_config().tie_word_embeddings = False
        model.config.tie_word_embeddings = False


def _compute_differences(model: Any, texts: Texts) -> list[float]:
    """Return how far the model's log-probabilities are from those that come with the texts.

    Returns:
        The absolute difference in nats of every token but each text's first.
    """
    import torch

    differences = []
    for tokens, logprobs in texts:
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            values = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), -1)
        differences.append(
            (values.gather(1, ids[0, 1:, None])[:, 0] - torch.tensor(logprobs)).abs()
        )
    values_in_nats: list[float] = torch.cat(differences).tolist()
    return values_in_nats


def build_parity(
    differences: Sequence[float], base_mean: float, texts: Texts, tolerance: Tolerance
) -> Parity:
    """Return the judgement of differences, in nats, of all tokens of the texts.

    `base_mean` is the mean difference of the base model.
    """
    mean = sum(differences) / len(differences)
    # The function max() may pass over a value that is NaN.
    largest = math.nan if math.isnan(mean) else max(differences)
    return Parity(
        texts=len(texts),
        tokens=len(differences),
        largest=largest,
        mean=mean,
        base_mean=base_mean,
        measure=tolerance.measure,
        limit=tolerance.limit,
        verified=judge_weights(largest, mean, base_mean, tolerance),
    )


def judge_weights(
    largest: float, mean: float, base_mean: float, tolerance: Tolerance
) -> bool | None:
    """Return whether weights are the trained ones, or None if that cannot be decided.

    Training often moves log-probabilities by less than the limit, so that the base model is within
    it too. A difference that is NaN is never within a limit.

    Args:
        largest: The largest difference of the weights from the server's values.
        mean: Their mean difference from them.
        base_mean: The mean difference of the base model from them.
        tolerance: Which difference must be within which limit.
    """
    if tolerance.measure == "largest":
        is_within_limit = largest <= tolerance.limit
    else:
        is_within_limit = (
            mean <= tolerance.limit
            and mean <= MAX_RATIO_TO_BASE * base_mean + FLOAT32_TOLERANCE.limit
        )
    if not is_within_limit:
        return False
    if mean <= MAX_RATIO_VERIFIED * base_mean:
        return True
    return None


def _read_revision(name: str, config: object) -> str:
    """Return the commit on the Hub, or the SHA-256 of the weights of a folder.

    It is "unknown" for a folder whose files of weights have other names than those of transformers.
    """
    commit = getattr(config, "_commit_hash", None)
    if commit:
        return str(commit)
    folder, digest = Path(name).expanduser(), hashlib.sha256()
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        return "unknown"
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"
