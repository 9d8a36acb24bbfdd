"""Write the tokens of an answer as texts, and choose how strongly each is coloured.

A token is coloured by the probability that the sampler gave it, or by how much the sampler and the
trainer differ on it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lachesis.base.json_text import Json
from lachesis.models.find_model import find_cached_snapshot

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)
# Probabilities below which a token is a level of heat stronger.
HEAT_LEVELS = (0.9, 0.7, 0.4, 0.15, 0.05, 0.01)
# Differences of log-probabilities, in nats, from which on a level is stronger.
DIFFERENCE_LEVELS = (0.05, 0.25, 1.0)


@dataclass(frozen=True)
class TokenView:
    """Hold one token of an answer."""

    text: str
    level: str
    """The name of its colour, or nothing."""
    logprob: float | None
    difference: float | None
    """Log-probability of the sampler less that of the trainer; None where one is not known."""

    @property
    def probability(self) -> float | None:
        """Return the probability that the sampler gave the token."""
        return None if self.logprob is None else math.exp(self.logprob)


@dataclass(frozen=True)
class Segment:
    """Hold consecutive tokens that the model sampled, or that it was given."""

    is_sampled: bool
    tokens: list[TokenView]

    @property
    def text(self) -> str:
        """Return the text of all of its tokens."""
        return "".join(token.text for token in self.tokens)


@functools.lru_cache(maxsize=8)
def load_tokenizer(model: str) -> Tokenizer | None:
    """Return the tokenizer of a model from a folder or the cache of the Hub; None if it is
    missing."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    folder = Path(model) if Path(model).is_absolute() else find_cached_snapshot(model)
    if folder is None:
        return None
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # The library raises plain exceptions for files that it cannot read.
        log.warning("the tokenizer of %s cannot be read: %s", model, error)
        return None


def decode_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return the text of each token; one that holds a part of a character only has none."""
    from tokenizers.decoders import DecodeStream

    # A character may take several tokens; the stream gives it with the last of them.
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in tokens]


def split_answer(row: Json, tokenizer: Tokenizer, *, by_difference: bool = False) -> list[Segment]:
    """Return a rollout from its first sampled token on, as segments.

    Args:
        row: The rollout with its tokens, as `read_group` returns it.
        tokenizer: The tokenizer of the base model.
        by_difference: Whether tokens are coloured by how sampler and trainer differ.
    """
    sampled = row.get("sampled") or []
    if True not in sampled:
        return []
    # The prompt is shown above all answers.
    first = sampled.index(True)
    logprobs = row.get("logprobs") or [None] * len(sampled)
    trained = row.get("trained_logprobs") or [None] * len(sampled)
    texts = decode_tokens(tokenizer, row["tokens"][first:])
    segments: list[Segment] = []
    for text, is_sampled, logprob, trained_logprob in zip(
        texts, sampled[first:], logprobs[first:], trained[first:], strict=False
    ):
        difference = None
        if logprob is not None and trained_logprob is not None:
            difference = logprob - trained_logprob
        level = ""
        if is_sampled:
            level = name_difference(difference) if by_difference else name_heat(logprob)
        token = TokenView(text, level, logprob, difference)
        if not segments or segments[-1].is_sampled != is_sampled:
            segments.append(Segment(is_sampled, []))
        segments[-1].tokens.append(token)
    return segments


def name_heat(logprob: float | None) -> str:
    """Return the colour of a token by its probability: `heat-1` to `heat-6`, or nothing."""
    if logprob is None:
        return ""
    level = sum(math.exp(logprob) < limit for limit in HEAT_LEVELS)
    return f"heat-{level}" if level else ""


def name_difference(difference: float | None) -> str:
    """Return the colour of a token by the sampler's log-probability less the trainer's."""
    if difference is None:
        return ""
    level = sum(abs(difference) >= limit for limit in DIFFERENCE_LEVELS)
    if level == 0:
        return ""
    # Heat has twice as many levels.
    return f"heat-{2 * level - 1}" if difference > 0 else f"minus-{level}"
