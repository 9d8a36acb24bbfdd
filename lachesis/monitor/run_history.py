"""Define what a judgement is made from: a run's steps, the sums over them, and facts about the run.

`RunFacts` also formats the commands that advice names, so that each of them fits this run: it names
only checkpoints that exist and sets only fields that the run's profile allows.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from lachesis.monitor.trend import WINDOW, Trend

Step = dict[str, Any]
HealthLevel = Literal["too early", "unknown", "healthy", "not learning", "suspect", "broken"]
# How bad a word is. `not learning` and `suspect` ask a person to look and never stop a run;
# `broken` may, where `limits.on_learning_failure` is `stop`.
SEVERITY: dict[str, int] = {
    "healthy": 0,
    "too early": 0,
    "unknown": 0,
    "not learning": 1,
    "suspect": 1,
    "broken": 2,
}
# Steps that are needed before their numbers are judged.
MIN_JUDGED_STEPS = 5
# Factor by which advice lowers the learning rate.
ADVISED_RATE_FACTOR = 1 / 3


class Finding(BaseModel):
    """One sign of trouble, the numbers behind it, and what to do about it."""

    word: HealthLevel
    evidence: str
    advice: str


class RunHealth(BaseModel):
    """The judgement of a run. `evidence` and `advice` are sorted with the most severe first."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    word: HealthLevel
    evidence: list[str]
    advice: list[str] = []


@dataclass(frozen=True)
class AdvisedEdit:
    """A configuration field that advice sets, and its effect as words that follow "with"."""

    field: str
    value: str
    effect: str


@dataclass(frozen=True)
class RunFacts:
    """What is known about a run apart from its steps."""

    run_id: str = "RUN"
    environment: str = "ENV"
    """The environment as the command line accepts it: a name or a file."""
    additional_environments: Sequence[str] = ()
    """The run's additional environments with their weights, as ENVIRONMENT=WEIGHT."""
    model: str | None = None
    """The base model, or None for the tiny model of this project."""
    profile: str = "embedded"
    total_steps: int | None = None
    batch_size: int = 0
    """Rollouts per step; 0 if unknown."""
    group_size: int = 0
    has_ended: bool = False
    status: str = "running"
    error: str | None = None
    checkpoints: Sequence[int] = ()
    """Steps of the complete checkpoints, in order."""
    learning_rate: float | None = None
    max_token_length: int | None = None
    tunable_fields: frozenset[str] = frozenset()
    """The fields that advice may set and that the profile leaves open."""
    tiny_model: bool = False
    """Whether the base model is the tiny model of this project, which can be pretrained on the
    task.
    """
    environment_counts: Mapping[str, Any] = field(default_factory=dict)
    """What the environment processes have counted; see `lachesis.env_process.counters`."""

    def find_checkpoint_near(self, step: int) -> int | None:
        """Return the newest checkpoint at or before `step`, or else the oldest one; None without
        any.
        """
        earlier = [
            checkpoint_step for checkpoint_step in self.checkpoints if checkpoint_step <= step
        ]
        if earlier:
            return max(earlier)
        return min(self.checkpoints, default=None)

    def format_stop_prefix(self) -> str:
        """Return the command that stops the run, or an empty string if it has ended."""
        if self.has_ended:
            return ""
        return f"`lachesis stop {self.run_id}`; then "

    def format_train_command(self, *edits: str, start_from: int | None = None) -> str:
        """Return the command that starts a new run with these edits."""
        argv = ["lachesis", "train", self.environment]
        argv += [
            argument
            for environment in self.additional_environments
            for argument in ("--with", environment)
        ]
        if self.profile != "embedded":
            argv += ["--profile", self.profile]
        if start_from is not None:
            argv += ["--from", f"{self.run_id}@{start_from}"]
        elif self.model is not None:
            argv += ["--model", self.model]
        for edit in edits:
            if edit.partition("=")[0] in self.tunable_fields:
                argv += ["--set", edit]
        return f"`{shlex.join(argv)}`"

    def advise_training(self, *edits: AdvisedEdit, start_from: int | None = None) -> str:
        """Return the command that starts a new run and its effect, as a sentence.

        The sentence promises only the edits that the profile allows, and names the fields that it
        locks.
        """
        allowed_edits = [edit for edit in edits if edit.field in self.tunable_fields]
        locked_fields = [edit.field for edit in edits if edit.field not in self.tunable_fields]
        settings = [f"{edit.field}={edit.value}" for edit in allowed_edits]
        if start_from is None:
            start_clause = "begins anew"
        else:
            start_clause = f"goes on from step {start_from}"
        sentence = f"{self.format_train_command(*settings, start_from=start_from)} {start_clause}"
        if allowed_edits:
            sentence += f" with {' and '.join(edit.effect for edit in allowed_edits)}"
        if locked_fields:
            sentence += f"; the profile {self.profile} fixes {' and '.join(locked_fields)}"
        return sentence

    def advise_lower_learning_rate(self, step: int) -> str:
        """Return the advice to continue from a checkpoint near `step` with a lower learning rate.

        Without any checkpoint, training begins from the start.
        """
        edits = []
        if self.learning_rate is not None:
            rate = f"{self.learning_rate * ADVISED_RATE_FACTOR:.2g}"
            edits.append(AdvisedEdit("learning_rate", rate, "a lower learning rate"))
        return self.advise_training(*edits, start_from=self.find_checkpoint_near(step))

    def format_test_command(self, environment: str | None = None) -> str:
        """Return the command that tests the environment with the run's base model."""
        argv = ["lachesis", "test", environment or self.environment]
        if self.profile != "embedded":
            argv += ["--profile", self.profile]
        elif self.model is not None:
            argv += ["--model", self.model]
        return f"`{shlex.join(argv)}`"

    def format_logs_command(self, service: str) -> str:
        """Return the command that shows the log of a service."""
        return f"`lachesis logs {self.run_id} {service}`"

    def format_report_command(self) -> str:
        """Return the command that writes the run's report, which contains sampled rollouts."""
        return f"`lachesis report {self.run_id}`"


@dataclass(frozen=True)
class RunHistory:
    """The history of a run: its first steps, its last steps, and the sums over all steps."""

    last_steps: Sequence[Step]
    first_steps: Sequence[Step]
    trend: Trend
    facts: RunFacts = field(default_factory=RunFacts)


def get_recent_values(steps: Sequence[Step], key: str, count: int = WINDOW) -> list[float]:
    """Return the values of this key in the last `count` steps, leaving out missing ones."""
    return [step[key] for step in steps[-count:] if step.get(key) is not None]


def compute_recent_mean(steps: Sequence[Step], key: str, count: int = WINDOW) -> float | None:
    """Return the mean of a key over the last `count` steps, or None if there is no value."""
    numbers = get_recent_values(steps, key, count)
    if numbers:
        return statistics.fmean(numbers)
    return None
