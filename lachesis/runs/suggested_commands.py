"""Write the `lachesis` commands that messages, pages and reports suggest, quoted for a shell.

An environment is given by its name where that is found, else by its file, so that a command works
in any folder.
"""

import itertools
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lachesis.config.launch_spec import SEED_FIELD
from lachesis.environment_catalog.lookup import get_name_or_file
from lachesis.runs.record import RunRecord

MIXTURE_FIELD = "env.mixture"


@dataclass(frozen=True)
class LaunchCommand:
    """Describe a training or a test as the command line is given it."""

    environment: str
    """A name, or the path of a file."""
    further_environments: Sequence[str] | None = ()
    """ENVIRONMENT=WEIGHT of each further environment; None where `settings` names them."""
    profile: str = "embedded"
    model: str | None = None
    from_checkpoint: str | None = None
    """RUN@STEP; the model follows from it."""
    seed: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The fields that were set, by SECTION.FIELD."""
    edits: Mapping[str, str] = field(default_factory=dict)
    """Fields that are set anew; they replace settings of the same field."""
    flags: Sequence[str] = ()

    def list_words(self, verb: str) -> list[list[str]]:
        """Return the words of a command: verb, environment, and options with values."""
        words = [["lachesis", verb, self.environment]]
        words += [["--with", further] for further in self.further_environments or ()]
        if self.profile != "embedded":
            words.append(["--profile", self.profile])
        if self.seed is not None:
            words.append(["--seed", str(self.seed)])
        if self.from_checkpoint is not None:
            words.append(["--from", self.from_checkpoint])
        elif self.model is not None:
            words.append(["--model", self.model])
        words += [["--set", f"{name}={value}"] for name, value in self._list_settings().items()]
        return [*words, *([flag] for flag in self.flags)]

    def _list_settings(self) -> dict[str, str]:
        """Return the values of all fields to set, as they are typed.

        Supervised fine-tuning, which the weights of a checkpoint have had, is not repeated.
        """
        left_out = {name.rpartition(".")[2] for name in self.edits}
        if self.further_environments is not None:
            left_out.add("mixture")
        if self.seed is not None:
            left_out.add(SEED_FIELD.rpartition(".")[2])
        settings = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in self.settings.items()
            if name.rpartition(".")[2] not in left_out
            and not (self.from_checkpoint and name.startswith("tinker.sft_"))
        }
        return {**settings, **self.edits}

    def format_training(self) -> str:
        """Return the command that starts the training."""
        return shlex.join(itertools.chain.from_iterable(self.list_words("train")))

    def format_training_lines(self) -> str:
        """Return the command that starts the training, with each option on a line of its own."""
        return " \\\n  ".join(map(shlex.join, self.list_words("train")))

    def format_test(self) -> str:
        """Return the command that tests the environment with the model."""
        return shlex.join(itertools.chain.from_iterable(self.list_words("test")))


def format_command(*words: str) -> str:
    """Return the command with these words after `lachesis`."""
    return shlex.join(("lachesis", *words))


def find_environment(record: RunRecord) -> str:
    """Return the word by which a command finds the environment of a run: a name, or a file."""
    return _find_word(record.environment, record.environment_file)


def _find_word(name: str, file: str) -> str:
    """Return the name of an environment, or its file where only that is found.

    A file that is gone may have been moved, or is on another machine; then the name may be found.
    """
    if not Path(file).is_file():
        return name
    return get_name_or_file(name, file)


def list_further_environments(record: RunRecord) -> list[str]:
    """Return ENVIRONMENT=WEIGHT of each further environment of a run."""
    mixture = record.set_fields.get(MIXTURE_FIELD) or {}
    return [
        f"{_find_word(name, code.environment_file)}={mixture.get(name, {}).get('weight', 1)}"
        for name, code in record.additional_environments.items()
    ]


def format_test(record: RunRecord) -> str:
    """Return the command that tests the environment of a run with its base model."""
    return LaunchCommand(
        environment=find_environment(record),
        profile=record.profile,
        model=record.base_model,
        settings=record.set_fields,
    ).format_test()


def format_repeat(record: RunRecord) -> str:
    """Return the command that starts the same run again, an option on each line.

    It needs nothing of this home, except files that a setting names. Further environments that
    have only a file are given with their weights alone.
    """
    further = list_further_environments(record)
    names = {word.rpartition("=")[0] for word in further}
    return LaunchCommand(
        environment=find_environment(record),
        further_environments=None if names <= set(record.additional_environments) else further,
        profile=record.profile,
        seed=record.seed,
        model=record.spec.model,
        from_checkpoint=record.forked_from,
        settings=record.set_fields,
    ).format_training_lines()


def advise_new_run(
    record: RunRecord,
    newest_step: int | None,
    fields: Iterable[str],
    purpose: str = "change other fields",
) -> str:
    """Return the end of an error message: how to start a new run with other values of `fields`.

    Args:
        record: The run that cannot be changed.
        newest_step: The step of its newest checkpoint, if it has one.
        fields: The names of the fields.
        purpose: What the new run is for, in words that follow "to".
    """
    source = f"{record.run_id}@{newest_step}" if newest_step is not None else None
    command = LaunchCommand(
        environment=find_environment(record),
        further_environments=list_further_environments(record),
        profile=record.profile,
        model=record.base_model,
        from_checkpoint=source,
        settings=record.set_fields,
        edits={name: "VALUE" for name in fields},
    ).format_training()
    start, text = "", "on the same environment"
    if source is not None:
        start, text = f'start_from="{source}"', f"from its weights of step {newest_step}"
    calls = f"rl_select_environment, rl_edit_config and rl_start_training({start})"
    return f"; to {purpose}, start a new run {text}: `{command}`, or {calls}"
