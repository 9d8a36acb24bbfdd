"""Translate the names and values of configuration fields that earlier releases used.

Old names are accepted wherever a field is named: in a run's YAML, in an operator's tables, by
`--set` and `--env`, and by the tools of agents. docs/upgrading.md has the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lachesis.base.renamed import warn_renamed


@dataclass(frozen=True)
class RenamedField:
    """Describe a field that had another name; `values` has the new value for each old one."""

    section: str
    old_name: str
    new_name: str
    values: Mapping[str, str] = field(default_factory=dict)

    def translate_value(self, value: Any) -> Any:
        """Return the value as it is called now."""
        return self.values.get(value, value) if isinstance(value, str) else value


RENAMED_FIELDS = (
    RenamedField(
        "tinker",
        "weight_by",
        "loss_aggregation",
        {"token": "token_mean", "sequence": "sequence_mean"},
    ),
    RenamedField(
        "tinker", "cut_rollouts", "truncated_rollouts", {"train": "keep", "leave_out": "drop"}
    ),
    RenamedField("tinker", "supervised_file", "sft_file"),
    RenamedField("tinker", "supervised_epochs", "sft_epochs"),
    RenamedField("tinker", "supervised_batch_size", "sft_batch_size"),
    RenamedField("tinker", "supervised_learning_rate", "sft_learning_rate"),
    RenamedField("limits", "on_broken", "on_learning_failure"),
    # Fields of the environments that inherit from lachesis.environment.
    RenamedField("env", "most_held_out", "max_held_out_items"),
    RenamedField("env", "verifier_timeout", "verifier_timeout_s"),
)


def find_renamed_field(name: str) -> RenamedField | None:
    """Return the field that had this name, with or without its section before it."""
    for renamed in RENAMED_FIELDS:
        if name in (renamed.old_name, f"{renamed.section}.{renamed.old_name}"):
            return renamed
    return None


def rename_old_fields(section: str, values: Any) -> Any:
    """Return the values of a section with old names and values replaced.

    A field that is given by both names keeps the value of the new one. What is not a mapping is
    returned as it is, for a validator to refuse.
    """
    if not isinstance(values, Mapping):
        return values
    renamed_values = dict(values)
    for renamed in RENAMED_FIELDS:
        if renamed.section != section or renamed.old_name not in renamed_values:
            continue
        warn_renamed(f"{section}.{renamed.old_name}", renamed.new_name)
        value = renamed.translate_value(renamed_values.pop(renamed.old_name))
        renamed_values.setdefault(renamed.new_name, value)
    return renamed_values
