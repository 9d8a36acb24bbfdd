"""Choose the sign of a verdict: a word with a shape and a colour."""

from dataclasses import dataclass

from lachesis.runs.record import RunRecord

# Verdicts that call for a look at the run.
ALARMING = ("broken", "suspect", "not learning", "stalled", "failed")


@dataclass(frozen=True)
class Mark:
    """Hold how a verdict is drawn."""

    word: str
    symbol: str
    """The name of the shape: full-circle, triangle, square or dashed-circle."""
    tone: str
    """The name of the colour: good, warn, bad or none."""


_SHAPES = {
    "healthy": ("full-circle", "good"),
    "suspect": ("triangle", "warn"),
    "not learning": ("triangle", "warn"),
    "stalled": ("triangle", "warn"),
    "broken": ("square", "bad"),
    "failed": ("square", "bad"),
    "works": ("full-circle", "good"),
    "learnable": ("full-circle", "good"),
    "too easy": ("triangle", "warn"),
    "too hard": ("triangle", "warn"),
}


def make_mark(word: str) -> Mark:
    """Return the mark of a verdict's word; one that says nothing about quality has no colour."""
    symbol, tone = _SHAPES.get(word, ("dashed-circle", "none"))
    return Mark(word, symbol, tone)


def choose_mark(record: RunRecord) -> Mark:
    """Return the mark of a run's verdict.

    A run that stands still is stalled, whatever was judged before. One that failed before it could
    be judged has failed.
    """
    if record.stall_text:
        return make_mark("stalled")
    if record.status == "failed" and record.learning in ("unknown", "too early"):
        return make_mark("failed")
    return make_mark(record.learning)


def needs_a_look(record: RunRecord) -> bool:
    """Return whether the verdict on a run calls for a look at it."""
    return choose_mark(record).word in ALARMING


def explain_mark(record: RunRecord) -> str:
    """Return in one line what the mark of a run stands on; nothing if nothing is known."""
    if record.stall_text:
        return record.stall_text.removeprefix("stalled ")
    if record.evidence and choose_mark(record).word != "failed":
        return record.evidence
    return next(iter((record.error or "").splitlines()), "")
