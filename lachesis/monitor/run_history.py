"""Define what a judgement is made from: a run's steps, the sums over them, and facts about the run.

`RunFacts` also formats the commands that advice names, so that each of them fits this run: it names
only checkpoints that exist and sets only fields that the run's profile allows.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from lachesis.monitor.reward_trend import WINDOW, Trend
from lachesis.runs.suggested_commands import LaunchCommand

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
# Difference of mean rewards that counts as a change.
MIN_LEVEL_CHANGE = 0.1
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
    """The base model, as `--model` takes it."""
    set_fields: Mapping[str, Any] = field(default_factory=dict)
    """The fields that the user has set at the start, as SECTION.FIELD."""
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
    effective_values: Mapping[str, str] = field(default_factory=dict)
    """Values that take effect in this run for the fields that advice may set."""
    can_be_taught: bool = False
    """Whether the base model is a tiny model of this project that was not taught the task."""
    environment_counts: Mapping[str, Any] = field(default_factory=dict)
    """What the environment processes have counted; see
    `lachesis.environment_process.rollout_counters`.
    """

    def find_checkpoint_before(self, step: int | None) -> int | None:
        """Return the newest checkpoint at or before `step`; None if there is none, or without
        `step`.

        A later one may have been spoiled by what happened after `step`.
        """
        if step is None:
            return None
        return max((saved for saved in self.checkpoints if saved <= step), default=None)

    def format_stop_prefix(self) -> str:
        """Return the command that stops the run, or an empty string if it has ended."""
        if self.has_ended:
            return ""
        return f"`lachesis stop {self.run_id}`; then "

    def format_train_command(self, *edits: str, start_from: int | None = None) -> str:
        """Return the command that starts a new run with the values of this run and these edits."""
        values = dict(edit.split("=", 1) for edit in edits)
        command = LaunchCommand(
            environment=self.environment,
            further_environments=self.additional_environments,
            profile=self.profile,
            model=self.model,
            from_checkpoint=None if start_from is None else f"{self.run_id}@{start_from}",
            settings=self.set_fields,
            edits={name: value for name, value in values.items() if name in self.tunable_fields},
        )
        return f"`{command.format_training()}`"

    def advise_training(self, *edits: AdvisedEdit, start_from: int | None = None) -> str:
        """Return the command that starts a new run and its effect, as a sentence.

        The sentence promises only the edits that the profile allows, and names the fields that it
        locks. An edit that the run has already is left out; a run that would be the same again is
        not advised.
        """
        allowed_edits = self.select_effective_edits(edits)
        locked_fields = [
            edit.field
            for edit in edits
            if edit.field not in self.tunable_fields and not self._has_value(edit)
        ]
        locked_clause = f"; the profile {self.profile} fixes {' and '.join(locked_fields)}"
        if not allowed_edits and start_from is None:
            sentence = f"{self.format_report_command()} shows what the rollouts have become"
            return sentence + (locked_clause if locked_fields else "")
        settings = [f"{edit.field}={edit.value}" for edit in allowed_edits]
        if start_from is None:
            start_clause = "begins anew"
        else:
            start_clause = f"goes on from step {start_from}"
        sentence = f"{self.format_train_command(*settings, start_from=start_from)} {start_clause}"
        if allowed_edits:
            sentence += f" with {' and '.join(edit.effect for edit in allowed_edits)}"
        return sentence + (locked_clause if locked_fields else "")

    def select_effective_edits(self, edits: Sequence[AdvisedEdit]) -> list[AdvisedEdit]:
        """Return the edits that the profile allows and that change this run."""
        return [
            edit
            for edit in edits
            if edit.field in self.tunable_fields and not self._has_value(edit)
        ]

    def _has_value(self, edit: AdvisedEdit) -> bool:
        return self.effective_values.get(edit.field) == edit.value

    def list_rate_edits(self) -> list[AdvisedEdit]:
        """Return the edit that lowers the learning rate, if that is known."""
        if self.learning_rate is None:
            return []
        rate = f"{self.learning_rate * ADVISED_RATE_FACTOR:.2g}"
        return [AdvisedEdit("learning_rate", rate, "a lower learning rate")]

    def advise_lower_learning_rate(self, step: int | None) -> str:
        """Return the advice to continue from the newest checkpoint up to `step` with a lower
        learning rate.

        Without such a checkpoint, training begins from the start.
        """
        return self.advise_training(
            *self.list_rate_edits(), start_from=self.find_checkpoint_before(step)
        )

    def format_test_command(self, environment: str | None = None) -> str:
        """Return the command that tests the environment with the run's base model."""
        command = LaunchCommand(
            environment=environment or self.environment,
            profile=self.profile,
            model=self.model,
            # The fields of this run's first environment need not be those of another one.
            settings={} if environment else self.set_fields,
        )
        return f"`{command.format_test()}`"

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

    @property
    def has_collapsed(self) -> bool:
        """Return whether the mean reward is far below the best window of this attempt."""
        reward = compute_recent_mean(self.last_steps, "reward/mean") or 0.0
        return self.trend.best is not None and self.trend.best - reward > MIN_LEVEL_CHANGE

    def find_last_good_step(self, key: str, is_good: Callable[[float], bool]) -> int | None:
        """Return the newest step whose value of `key` is good, or None if none is known."""
        for step in (*reversed(self.last_steps), *reversed(self.first_steps)):
            if step.get(key) is not None and is_good(step[key]):
                return int(step["step"])
        return None

    def advise_return(self, last_good_step: int | None) -> str:
        """Return the advice to stop, and to go on from before the trouble with smaller steps."""
        return (
            f"{self.facts.format_stop_prefix()}"
            f"{self.facts.advise_lower_learning_rate(last_good_step)}"
        )


def get_recent_values(steps: Sequence[Step], key: str, count: int = WINDOW) -> list[float]:
    """Return the values of this key in the last `count` steps, leaving out missing ones."""
    return [step[key] for step in steps[-count:] if step.get(key) is not None]


def compute_recent_mean(steps: Sequence[Step], key: str, count: int = WINDOW) -> float | None:
    """Return the mean of a key over the last `count` steps, or None if there is no value."""
    numbers = get_recent_values(steps, key, count)
    if numbers:
        return statistics.fmean(numbers)
    return None
