"""Every command that an advice, a next step or an error message names is one that the command line
takes and that works.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lachesis.base import paths
from lachesis.base.errors import RunStateError
from lachesis.base.timestamps import now_iso
from lachesis.catalog import describe
from lachesis.cli.main import build_parser
from lachesis.config import run_config as run_config
from lachesis.config.edits import parse_assignment
from lachesis.monitor.judgement import judge_observation
from lachesis.monitor.monitor_memory import MonitorMemory
from lachesis.monitor.observe import observe_files
from lachesis.runs.checkpoints import Checkpoints, Manifest
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.run_record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.service import LachesisService, LaunchRequest
from lachesis.tiny_model import build

RUN = "0123abcd"
NAMES = [
    ["env"],
    ["train"],
    ["resume"],
    ["test"],
    ["status"],
    ["results"],
    ["metrics"],
    ["logs"],
    ["weights"],
    ["report"],
    ["model"],
    ["env", "check"],
    ["env", "new"],
]
COMMAND = re.compile(r"`(lachesis [^`]+)`")
WORKED: set[str] = set()
GOOD = {
    "batch/rollouts": 128,
    "rollouts/invalid": 0,
    "train/learning_rate": 1.5e-3,
    "weights/change": 0.1,
    "entropy/sampling": 1.0,
    "logprobs/gap": 0.01,
}
FAULTS: dict[str, dict[str, Any]] = {
    "weights stay": {"weights/change": 0.0},
    "loss is no number": {"train/loss": float("nan")},
    "no signal": {"batch/zero_signal_share": 1.0, "reward/mean": 0.0},
    "nothing is sent": {"rollouts/dropped": 12_800},
    "sampler and trainer disagree": {"logprobs/gap": 2.0},
    "rollouts fail": {"rollouts/invalid": 1000},
    "one of several has no reward": {"environments/arithmetic/reward_mean": 0.0},
    "the reward falls": {"reward/mean": 0.01},
    "the reward stays": {"reward/mean": 0.3},
    "the entropy is gone": {"entropy/sampling": 0.0, "reward/mean": 0.2},
    "the length drifts": {"length/mean": 90.0},
    "cut off": {"rollouts/truncated_share": 0.9},
    "held-out falls": {
        "eval/percent_correct": 0.1,
        "eval/low": 0.09,
        "eval/high": 0.11,
        "eval/step": 39,
    },
    "held-out lags": {
        "eval/percent_correct": 0.31,
        "eval/low": 0.3,
        "eval/high": 0.32,
        "eval/step": 39,
    },
}


PROMISES = {
    "lower learning rate": "learning_rate",
    "fresher rollouts": "max_batches_offpolicy",
    "clipped loss": "loss_fn",
    "larger groups": "group_size",
    "longer answers": "max_token_length",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for the module: it keeps what an environment's configuration is, which takes seconds to
    find out.
    """
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def store(home: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    monkeypatch.setenv("LACHESIS_HOME", str(home))
    monkeypatch.setenv("TINKER_API_KEY", "tml-no-key")
    shutil.rmtree(home / "runs", ignore_errors=True)
    return RunStore(home)


def make(store: RunStore, *, profile: str = "embedded", **changes: Any) -> RunRecord:
    tiny = str(build.get_tiny_model_path(build.TinyModelRecipe(), store.home))
    model = tiny if profile == "embedded" else "Qwen/Qwen3-8B"
    if profile == "embedded":
        Path(tiny).mkdir(parents=True, exist_ok=True)
        (Path(tiny) / "config.json").write_text("{}")
    config = run_config.resolve_run_config("arithmetic", profile, {}, model=model)
    file = str(paths.checkout_dir() / "environments" / "arithmetic.py")
    values = {
        "environment": "arithmetic",
        "environment_file": file,
        "profile": profile,
        "base_model": model,
        "seed": 0,
    }
    values |= {
        "total_steps": 100,
        "wandb_project": "p",
        "wandb_run_name": "n",
        "status": "running",
        "started_at": now_iso(),
    }
    record = RunRecord.model_validate({"run_id": RUN, **values, **changes})
    store.create(record, config.to_yaml())
    return record


def write_steps(store: RunStore, fault: dict[str, Any]) -> None:
    """Forty good steps with a rising reward, and as many with the fault."""
    metrics = MetricsFile(store.dir(RUN).metrics)
    for step, values in list_faulty_steps(fault):
        metrics.append(step, values)


def list_faulty_steps(fault: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Give forty good steps with a rising reward, and as many with the fault."""
    flat = fault.get("reward/mean") == 0.3
    for step in range(1, 81):
        known = {
            "reward/mean": 0.3 if flat else 0.2 + step / 200,
            "length/mean": 10.0,
            "train/loss": 0.1,
            **GOOD,
        }
        if step % 10 == 0 and "eval/low" in fault:
            known |= {
                "eval/percent_correct": 0.3,
                "eval/low": 0.29,
                "eval/high": 0.31,
                "eval/step": step - 1,
            }
        has_fault = step > 40 and (step % 10 == 0 or "eval/low" not in fault)
        yield step, {**known, **(fault if has_fault else {})}


def advice_of(store: RunStore) -> tuple[str, list[str]]:
    health = judge_observation(observe_files(store, store.load(RUN)), MonitorMemory())
    assert len(health.advice) <= len(health.evidence), "several signs may have one remedy"
    assert len(set(health.advice)) == len(health.advice)
    return health.word, health.advice


def require_works(command: str, service: LachesisService) -> None:
    """Parse the command, and do what it does as far as no server is needed for it. What takes long
    is done once.
    """
    if command in WORKED:
        return
    args = build_parser().parse_args(shlex.split(command)[1:])
    run = getattr(args, "run", None)
    if args.command == "stop":
        assert not service.get_run(run).has_ended, "there must be something to stop"
    elif args.command == "logs":
        service.read_log(run, args.service)
    elif args.command == "report":
        assert service.write_report(run)
        WORKED.add(command)
    elif args.command == "test":
        launch = LaunchRequest(
            describe.register_environment(args.environment),
            args.profile,
            model=(args.model or [None])[0],
        )
        assert service.describe(launch)["problem"] is None
        WORKED.add(command)
    elif args.command == "train":
        edits = tuple(parse_assignment(text) for text in args.edits)
        service.preview(
            LaunchRequest(
                describe.register_environment(args.environment),
                args.profile,
                edits,
                args.model,
                start_from=args.start_from,
            )
        )
    elif args.command == "model":
        assert [describe.find_environment(name) for name in args.environments]
    else:
        assert (args.command, args.action) == ("env", "check")
        assert describe.find_environment(describe.register_environment(args.environment))


@pytest.mark.parametrize("fault", FAULTS)
def test_each_advice_names_a_command_that_works(store: RunStore, fault: str) -> None:
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
            require_works(command, LachesisService(store.home))


def test_an_advice_goes_on_from_a_checkpoint_that_exists(store: RunStore) -> None:
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


def test_an_ended_run_is_not_to_be_stopped(store: RunStore) -> None:
    make(store, status="completed", ended_at=now_iso())
    write_steps(store, FAULTS["the reward falls"])
    assert "lachesis stop" not in " ".join(advice_of(store)[1])


@pytest.mark.parametrize(
    "fault", ["the reward falls", "sampler and trainer disagree", "no signal", "cut off"]
)
def test_an_advice_sets_no_field_that_is_locked(store: RunStore, fault: str) -> None:
    """On the cloud's profile the learning rate and the limits of tokens are."""
    make(store, profile="tinker")
    write_steps(store, FAULTS[fault])
    Checkpoints(store.dir(RUN).checkpoints).write(
        Manifest(step=25, state="tinker://s", sampler_weights="tinker://w")
    )
    for command in COMMAND.findall(" ".join(advice_of(store)[1])):
        require_works(command, LachesisService(store.home))


@pytest.mark.parametrize("profile", ["embedded", "tinker"])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_advice_promises_what_its_command_does(
    store: RunStore,
    profile: str,
    fault: str,
) -> None:
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


def test_an_advice_says_what_the_profile_fixes(store: RunStore) -> None:
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
def test_the_advice_before_the_first_step_works(store: RunStore, counts: dict[str, Any]) -> None:
    make(store)
    store.dir(RUN).get_counters_file("environment").write_text(
        json.dumps({"written_at": time.time(), **counts})
    )
    _, advice = advice_of(store)
    commands = COMMAND.findall(" ".join(advice))
    assert len(commands) >= 2
    for command in commands:
        require_works(command, LachesisService(store.home))


@pytest.mark.parametrize("status", ["running", "stopped", "failed", "completed"])
def test_next_steps_work(store: RunStore, status: str) -> None:
    make(store, status=status, ended_at=None if status == "running" else now_iso())
    write_steps(store, {})
    service = LachesisService(store.home)
    answers = (service.get_status(RUN).to_payload(), service.get_results(RUN).to_payload())
    for command in {command for answer in answers for command in answer["next_steps"]}:
        args = build_parser().parse_args(shlex.split(command)[1:])
        if args.command in ("stop", "logs", "report"):
            require_works(command, service)
        else:
            assert args.command in ("status", "results", "resume", "weights")
            assert args.run == RUN
    if status == "completed":
        with pytest.raises(RunStateError):
            service.resume(RUN)


def literals(file: Path) -> list[str]:
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


def test_the_command_line_takes_every_command_that_a_text_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Messages, next steps and docstrings of the whole project."""
    root = Path(__file__).parents[2]
    named: dict[str, str] = {}
    for folder in ("lachesis", "flows", "tasks", "deployments"):
        for file in sorted((root / folder).rglob("*.py")):
            for text in literals(file):
                named |= dict.fromkeys(COMMAND.findall(text), str(file.relative_to(root)))
    assert len(named) > 20
    wrong = {}
    for command, place in named.items():
        words = shlex.split(command.replace("...", "").replace("…", ""))[1:]
        if words in NAMES:
            continue  # of a command, without what it needs
        try:
            build_parser().parse_args(words)
        except SystemExit as end:
            if end.code:
                wrong[command] = f"{place}: {capsys.readouterr().err.splitlines()[-1]}"
    assert wrong == {}


def test_an_advice_has_an_effect(store: RunStore) -> None:
    """A value that the run has is not advised, and a run like the one that failed neither."""
    make(store)
    config = store.dir(RUN).config
    config.write_text(config.read_text().replace("loss_fn: auto", "loss_fn: ppo"))
    write_steps(store, FAULTS["sampler and trainer disagree"])
    advice = advice_of(store)[1][0]
    assert "loss_fn" not in advice, "it is ppo"
    assert "max_batches_offpolicy" not in advice, "it is 1"
    assert "--set learning_rate=0.0005` begins anew with a lower learning rate" in advice


def test_the_advice_after_a_collapse_goes_back_to_before_it(store: RunStore) -> None:
    """By the run's own curve of what has collapsed; easier items are no remedy for a model that
    had learned them.
    """
    make(store)
    write_steps(
        store,
        {"reward/mean": 0.0, "batch/zero_signal_share": 1.0, "entropy/sampling": 0.0},
    )
    checkpoints = Checkpoints(store.dir(RUN).checkpoints)
    for step in (39, 60, 80):
        checkpoints.write(Manifest(step=step, state="tinker://s", sampler_weights="tinker://w"))
    health = judge_observation(observe_files(store, store.load(RUN)), MonitorMemory())
    assert len(health.evidence) == 3
    assert health.word == "broken"
    (advice,) = health.advice
    assert f"--from {RUN}@39 --set learning_rate=0.0005` goes on from step 39" in advice


def test_the_likeliest_cause_comes_first(store: RunStore) -> None:
    """Answers that are cut off have no reward, rather than the other way round."""
    make(store)
    write_steps(
        store,
        {
            "rollouts/truncated_share": 0.9,
            "reward/mean": 0.3,
            "batch/zero_signal_share": 0.95,
        },
    )
    assert "max_token_length=" in advice_of(store)[1][0]


def test_an_advised_run_is_like_the_one_that_needs_it(store: RunStore) -> None:
    """With its own fields, its model and its further environments; what is advised has priority."""
    set_fields = {
        "env.batch_size": 64,
        "env.group_size": 8,
        "tinker.learning_rate": 3e-3,
        "tinker.wandb_group": "my runs",
        "env.mixture": {"reverse_text": {"weight": 0.5}},
        "limits.max_hours": None,
    }
    make(store, set_fields=set_fields)
    write_steps(store, FAULTS["no signal"])
    commands = [
        shlex.split(command)
        for sentence in advice_of(store)[1]
        for command in COMMAND.findall(sentence)
    ]
    (trained,) = [words for words in commands if words[1] == "train"]
    settings = [words for words in itertools.pairwise(trained) if words[0] == "--set"]
    assert dict(text.split("=", 1) for _, text in settings) == {
        "env.batch_size": "64",
        "env.group_size": "8",
        "tinker.wandb_group": "my runs",
        "limits.max_hours": "null",
        "learning_rate": "0.0005",
    }
    assert trained[2:5] == ["arithmetic", "--model", "tiny"]


def test_an_advised_run_from_a_checkpoint_does_not_repeat_the_fine_tuning(store: RunStore) -> None:
    make(store, set_fields={"tinker.sft_file": "/a.jsonl", "tinker.sft_epochs": 2, "env.x": 1})
    write_steps(store, FAULTS["the reward falls"])
    assert "--set tinker.sft_file=/a.jsonl --set tinker.sft_epochs=2" in advice_of(store)[1][0]
    Checkpoints(store.dir(RUN).checkpoints).write(
        Manifest(step=20, state="tinker://s", sampler_weights="tinker://w")
    )
    advice = advice_of(store)[1][0]
    assert "sft" not in advice
    assert "--set env.x=1" in advice


@pytest.mark.parametrize("status", ["pending", "failed", "stopped"])
def test_next_steps_of_a_run_without_a_step_work(store: RunStore, status: str) -> None:
    """One that waits has no log yet, and one that failed at its start has a report."""
    ended_at = None if status == "pending" else now_iso()
    make(store, status=status, ended_at=ended_at, failed_service="engine", error="no model")
    service = LachesisService(store.home)
    steps = service.get_status(RUN).next_steps
    assert (f"lachesis logs {RUN} engine" in steps) == (status == "failed")
    assert (f"lachesis resume {RUN}" in steps) == (status != "pending")
    for command in steps:
        args = build_parser().parse_args(shlex.split(command)[1:])
        if args.command in ("stop", "logs", "report"):
            WORKED.discard(command)
            require_works(command, service)
    assert service.get_results(RUN).to_payload()["next_steps"]
