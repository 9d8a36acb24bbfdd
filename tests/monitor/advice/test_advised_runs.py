"""The run that is advised is like the one that needs it, and differs where that helps."""

import itertools
import shlex

from lachesis.checkpoints.manifests import Checkpoints, Manifest
from lachesis.monitor.observe import observe_files
from lachesis.monitor.run_health import judge_observation
from lachesis.monitor.tick_memory import MonitorMemory
from tests.monitor.advice.runs import COMMAND, FAULTS, RUN, advice_of, make, write_steps


def test_an_advice_has_an_effect(store):
    """A value that the run has is not advised, and a run like the one that failed neither."""
    make(store)
    config = store.dir(RUN).config
    config.write_text(config.read_text().replace("loss_fn: auto", "loss_fn: ppo"))
    write_steps(store, FAULTS["sampler and trainer disagree"])
    advice = advice_of(store)[1][0]
    assert "loss_fn" not in advice, "it is ppo"
    assert "max_batches_offpolicy" not in advice, "it is 1"
    assert "--set learning_rate=0.0005` begins anew with a lower learning rate" in advice


def test_the_advice_after_a_collapse_goes_back_to_before_it(store):
    """By the run's own curve of what has collapsed; easier items are no remedy for a model that
    had learned them.
    """
    make(store)
    write_steps(
        store, {"reward/mean": 0.0, "batch/zero_signal_share": 1.0, "entropy/sampling": 0.0}
    )
    checkpoints = Checkpoints(store.dir(RUN).checkpoints)
    for step in (39, 60, 80):
        checkpoints.write(Manifest(step=step, state="tinker://s", sampler_weights="tinker://w"))
    health = judge_observation(observe_files(store, store.load(RUN)), MonitorMemory())
    assert len(health.evidence) == 3
    assert health.word == "broken"
    (advice,) = health.advice
    assert f"--from {RUN}@39 --set learning_rate=0.0005` goes on from step 39" in advice


def test_the_likeliest_cause_comes_first(store):
    """Answers that are cut off have no reward, rather than the other way round."""
    make(store)
    write_steps(
        store,
        {"rollouts/truncated_share": 0.9, "reward/mean": 0.3, "batch/zero_signal_share": 0.95},
    )
    assert "max_token_length=" in advice_of(store)[1][0]


def test_an_advised_run_is_like_the_one_that_needs_it(store):
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


def test_an_advised_run_from_a_checkpoint_does_not_repeat_the_fine_tuning(store):
    make(store, set_fields={"tinker.sft_file": "/a.jsonl", "tinker.sft_epochs": 2, "env.x": 1})
    write_steps(store, FAULTS["the reward falls"])
    assert "--set tinker.sft_epochs=2 --set tinker.sft_file=/a.jsonl" in advice_of(store)[1][0]
    Checkpoints(store.dir(RUN).checkpoints).write(
        Manifest(step=20, state="tinker://s", sampler_weights="tinker://w")
    )
    advice = advice_of(store)[1][0]
    assert "sft" not in advice
    assert "--set env.x=1" in advice
