"""Check what a Tinker server answers against the protocol, before a wrong answer trains something.

Servers of other makers differ from Tinker in ways that would end in a shape error somewhere, or in
no error at all. What is wrong is named here where it arrives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lachesis.base.errors import ServerProtocolError
from lachesis.base.tinker_client import get_base_url

if TYPE_CHECKING:
    import tinker

LOSS_SUM = "loss:sum"


def check_prompt_logprobs(logprobs: Sequence[float | None], num_tokens: int) -> list[float | None]:
    """Return the log-probabilities of a prompt, one for each token.

    The first one is None, because nothing comes before that token.

    Raises:
        ServerProtocolError: There is another number of them, or one is missing or not finite.
    """
    if len(logprobs) != num_tokens:
        raise _make_error(
            f"{len(logprobs)} log-probabilities of a text of {num_tokens} tokens",
            "one for each token, and null for the first",
        )
    for position, value in enumerate(logprobs[1:], start=1):
        if value is None or not math.isfinite(value):
            raise _make_error(
                f"{value} as the log-probability of token {position} of a text",
                "null for the first token only, and finite numbers for the others",
            )
    return list(logprobs)


def check_samples(sequences: Sequence[tinker.types.SampledSequence], num_samples: int) -> None:
    """Check the answers to one request for samples.

    Raises:
        ServerProtocolError: There is another number of them, or one does not have a log-probability
            for each of its tokens.
    """
    if len(sequences) != num_samples:
        raise _make_error(f"{len(sequences)} samples", f"the {num_samples} that were asked for")
    for sequence in sequences:
        num_logprobs = len(sequence.logprobs or [])
        if num_logprobs != len(sequence.tokens):
            raise _make_error(
                f"{num_logprobs} log-probabilities of a sample of {len(sequence.tokens)} tokens",
                "one for each sampled token",
            )
        if not all(map(math.isfinite, sequence.logprobs or [])):
            raise _make_error(
                "a log-probability of a sampled token that is not finite", "finite numbers"
            )


def check_loss_output(output: tinker.ForwardBackwardOutput, num_tokens_D: Sequence[int]) -> None:
    """Check the answer to a pass over datums.

    Args:
        output: The answer.
        num_tokens_D: The number of target tokens of each datum, (D,).

    Raises:
        ServerProtocolError: The sum of the losses is missing, or a datum does not have a
            log-probability for each of its target tokens.
    """
    if LOSS_SUM not in output.metrics:
        names = ", ".join(sorted(output.metrics)) or "none"
        raise _make_error(f"the metrics {names} of a pass", f"`{LOSS_SUM}` among them")
    if len(output.loss_fn_outputs) != len(num_tokens_D):
        raise _make_error(
            f"results of {len(output.loss_fn_outputs)} datums", f"those of all {len(num_tokens_D)}"
        )
    for index, (loss_output, num_tokens) in enumerate(
        zip(output.loss_fn_outputs, num_tokens_D, strict=True)
    ):
        tensor = loss_output.get("logprobs")
        num_logprobs = len(tensor.data) if tensor is not None else 0
        if num_logprobs != num_tokens:
            raise _make_error(
                f"{num_logprobs} log-probabilities of datum {index}, which has {num_tokens} "
                "target tokens",
                "one for each target token",
            )


def _make_error(answer: str, expected: str) -> ServerProtocolError:
    return ServerProtocolError(
        f"the Tinker server at {get_base_url()} returned {answer}; the protocol gives {expected}. "
        "Training with it would be wrong, so a run ends at its last checkpoint; use a server "
        "that gives these, or a newer version of this one"
    )
