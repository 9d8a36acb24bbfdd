"""Every command that an advice, a next step or an error message names is one that the command line
takes and that works.
"""

import ast
import json
import shlex
import time
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from lachesis.base.errors import RunStateError
from lachesis.base.timestamps import now_iso
from lachesis.checkpoints.manifests import Checkpoints, Manifest
from lachesis.cli.main import GROUPS, NOUNS
from lachesis.config import run_config as run_config
from lachesis.operations.runs import get_results, get_status, resume_run
from lachesis.runs.store import RunStore
from tests.harness.command_line import parse_command
from tests.monitor.advice.runs import (
    COMMAND,
    FAULTS,
    RUN,
    WORKED,
    advice_of,
    make,
    require_works,
    write_steps,
)

NAMES = [
    *(words.split() for commands in GROUPS.values() for words, *_ in commands),
    *([noun] for noun in NOUNS),
]
PROMISES = {
    "lower learning rate": "learning_rate",
    "fresher rollouts": "max_batches_offpolicy",
    "clipped loss": "loss_fn",
    "larger groups": "group_size",
    "longer answers": "max_token_length",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_advice_names_a_command_that_works(store, fault):
    make(store)
    write_steps(store, FAULTS[fault])
    for step in (25, 50):
        Checkpoints(store.dir(RUN).checkpoints).write(
            Manifest(step=step, state="tinker://s", sampler_weights="tinker://w")
        )
    word, advice = advice_of(store)
    assert word in ("suspect", "not learning", "broken")
    for sentence in advice:
        commands = COMMAND.findall(sentence)
        assert commands, sentence
        for command in commands:
            require_works(command, RunStore(store.home))


def test_an_advice_goes_on_from_a_checkpoint_that_exists(store):
    make(store)
    write_steps(store, FAULTS["the reward falls"])
    assert "--from" not in advice_of(store)[1][0], "there is none"
    checkpoints = Checkpoints(store.dir(RUN).checkpoints)
    checkpoints.write(Manifest(step=60, state="tinker://s", sampler_weights="tinker://w"))
    advice = advice_of(store)[1][0]
    assert "--from" not in advice, "this one is of the time after the fall"
    assert "--model tiny --set learning_rate=0.0005` begins anew" in advice
    checkpoints.write(Manifest(step=20, state="tinker://s", sampler_weights="tinker://w"))
    assert f"--from {RUN}@20 --set learning_rate=0.0005" in advice_of(store)[1][0]
    checkpoints.write(Manifest(step=30, state="tinker://s", sampler_weights="tinker://w"))
    assert f"--from {RUN}@30 " in advice_of(store)[1][0], (
        "the newest that is not after the best time"
    )


def test_an_ended_run_is_not_to_be_stopped(store):
    make(store, status="completed", ended_at=now_iso())
    write_steps(store, FAULTS["the reward falls"])
    assert "lachesis stop" not in " ".join(advice_of(store)[1])


@pytest.mark.parametrize(
    "fault", ["the reward falls", "sampler and trainer disagree", "no signal", "cut off"]
)
def test_an_advice_sets_no_field_that_is_locked(store, fault):
    """On the cloud's profile the learning rate and the limits of tokens are."""
    make(store, profile="tinker")
    write_steps(store, FAULTS[fault])
    Checkpoints(store.dir(RUN).checkpoints).write(
        Manifest(step=25, state="tinker://s", sampler_weights="tinker://w")
    )
    for command in COMMAND.findall(" ".join(advice_of(store)[1])):
        require_works(command, RunStore(store.home))


@pytest.mark.parametrize("profile", ["embedded", "tinker"])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_advice_promises_what_its_command_does(store, profile, fault):
    """Where the profile fixes a field, following the advice would cost the same run again."""
    make(store, profile=profile)
    write_steps(store, FAULTS[fault])
    checkpoint = Manifest(step=25, state="tinker://s", sampler_weights="tinker://w")
    for exists in (False, True):
        if exists:
            Checkpoints(store.dir(RUN).checkpoints).write(checkpoint)
        for sentence in advice_of(store)[1]:
            command = " ".join(COMMAND.findall(sentence))
            for promise, field in PROMISES.items():
                assert (promise in sentence) == (f"--set {field}=" in command), sentence
            assert ("goes on from step 25" in sentence) == (f"--from {RUN}@25" in command), sentence


def test_an_advice_says_what_the_profile_fixes(store):
    make(store, profile="tinker")
    checkpoint = Manifest(step=30, state="tinker://s", sampler_weights="tinker://w")
    Checkpoints(store.dir(RUN).checkpoints).write(checkpoint)
    write_steps(store, FAULTS["the entropy is gone"])
    command = f"`lachesis train arithmetic --profile tinker --from {RUN}@30`"
    advice = f"{command} goes on from step 30; the profile tinker fixes learning_rate"
    assert any(sentence.endswith(advice) for sentence in advice_of(store)[1])
    store.dir(RUN).metrics.unlink()
    write_steps(store, FAULTS["sampler and trainer disagree"])
    advice = (
        "goes on from step 30; the profile tinker fixes max_batches_offpolicy and learning_rate"
    )
    assert advice_of(store)[1][0].endswith(f"{command} {advice}"), "its loss is ppo already"


@pytest.mark.parametrize(
    "counts", [{"invalid_rollouts": 640, "errors": {"E: x": 40}}, {"dropped_rollouts": 640}]
)
def test_the_advice_before_the_first_step_works(store, counts):
    make(store)
    store.dir(RUN).get_counters_file("environment").write_text(
        json.dumps({"written_at": time.time(), **counts})
    )
    _, advice = advice_of(store)
    commands = COMMAND.findall(" ".join(advice))
    assert len(commands) >= 2
    for command in commands:
        require_works(command, RunStore(store.home))


@pytest.mark.parametrize("status", ["running", "stopped", "failed", "completed"])
def test_next_steps_work(store, status):
    make(store, status=status, ended_at=None if status == "running" else now_iso())
    write_steps(store, {})
    store = RunStore(store.home)
    answers = (get_status(store, RUN).to_payload(), get_results(store, RUN).to_payload())
    for command in {command for answer in answers for command in answer["next_steps"]}:
        args = parse_command(shlex.split(command)[1:])
        if args.command in ("stop", "logs", "report"):
            require_works(command, store)
        else:
            assert args.command in ("status", "resume", "export")
            assert args.run == RUN
    if status == "completed":
        with pytest.raises(RunStateError):
            resume_run(store, RUN)


def literals(file):
    """Return the texts of a module, with a run id where a value is put in."""
    texts = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else RUN for part in node.values]
            texts.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(
                node.value.format_map(Placeholders()) if "{run}" in node.value else node.value
            )
    return texts


class Placeholders(dict[str, str]):
    """Put a run id into every field of a format."""

    def __missing__(self, key: str) -> str:
        return RUN


def test_the_command_line_takes_every_command_that_a_text_names(capsys):
    """Messages, next steps and docstrings of the whole project."""
    root = Path(__file__).parents[3]
    named: dict[str, str] = {}
    for folder in ("lachesis", "flows", "tasks", "deployments"):
        for file in sorted((root / folder).rglob("*.py")):
            for text in literals(file):
                named |= dict.fromkeys(COMMAND.findall(text), str(file.relative_to(root)))
    assert len(named) > 20
    wrong = {}
    for command, place in named.items():
        command_line = command.replace("...", "").replace("…", "").partition(" > ")[0]
        words = shlex.split(command_line)[1:]
        if words in NAMES or words[0] in ("COMMAND", RUN):
            continue  # of a command, without what it needs, or one that is put in
        try:
            parse_command(words)
        except CycloptsError as error:
            wrong[command] = f"{place}: {error}"
        except SystemExit:  # The text names --help or --version.
            capsys.readouterr()
    assert wrong == {}


@pytest.mark.parametrize("status", ["pending", "failed", "stopped"])
def test_next_steps_of_a_run_without_a_step_work(store, status):
    """One that waits has no log yet, and one that failed at its start has a report."""
    ended_at = None if status == "pending" else now_iso()
    make(store, status=status, ended_at=ended_at, failed_service="engine", error="no model")
    store = RunStore(store.home)
    steps = get_status(store, RUN).next_steps
    assert (f"lachesis logs {RUN} engine" in steps) == (status == "failed")
    assert (f"lachesis resume {RUN}" in steps) == (status != "pending")
    for command in steps:
        args = parse_command(shlex.split(command)[1:])
        if args.command in ("stop", "logs", "report"):
            WORKED.discard(command)
            require_works(command, store)
    assert get_results(store, RUN).to_payload()["next_steps"]
