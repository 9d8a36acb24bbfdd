"""Several environments feed one run: their shares, a stop and a resume, the deaths of both, and
what each has learned.
"""

import os
import signal
from pathlib import Path

import pytest

from lachesis.checkpoints.manifests import Checkpoints
from lachesis.runs.metrics import MetricsFile
from tests.e2e.test_lifecycle import record, steps
from tests.harness.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]
SIZES = (
    "--set",
    "batch_size=24",
    "--set",
    "group_size=8",
    "--set",
    "save_checkpoint_interval=2",
    "--set",
    "use_wandb=false",
)


def test_two_environments_train_one_model(cli, served_home, calm, wait_ended):
    refused = cli(
        "train", "calm", "--model", "tiny", "--with", "calm", expect=1, LACHESIS_ENVIRONMENTS=calm
    )
    assert "env.mixture names calm, which is the run's first environment" in refused["error"]
    words = (
        "train",
        "calm",
        "--model",
        "tiny",
        "--with",
        "reverse_text=0.5",
        *SIZES,
        "--set",
        "total_steps=45",
    )
    run_id = cli(*words, LACHESIS_ENVIRONMENTS=calm)["run_id"]
    wait_until(lambda: len(steps(served_home, run_id)) >= 3, 150, "three steps")
    assert cli("status", run_id)["processes"]["env-reverse_text"] == "running"
    assert cli("stop", run_id)["status"] == "stopped"
    newest = Checkpoints(served_home / "runs" / run_id / "checkpoints").find_newest()
    assert newest is not None
    assert newest.groups_by_environment == {"calm": 2 * newest.step, "reverse_text": newest.step}

    cli("resume", run_id)
    wait_until(lambda: steps(served_home, run_id)[-1] >= newest.step + 3, 150, "three steps more")
    for service in ("environment", "environment-reverse_text"):  # each is started again
        os.kill(record(served_home, run_id)["services"][service]["pid"], signal.SIGKILL)
    wait_ended(run_id)
    assert record(served_home, run_id)["status"] == "completed", record(served_home, run_id)[
        "error"
    ]

    lines = MetricsFile(served_home / "runs" / run_id / "metrics.jsonl").read()
    made = [
        tuple(line.get(f"environments/{name}/rollouts") for name in ("calm", "reverse_text"))
        for line in lines
    ]
    assert len(made) == 45
    assert sum(pair == (16, 8) for pair in made) >= 41, (
        f"two parts to one, but for what waited at the death: {made}"
    )
    means = [
        (2 * line["environments/calm/reward_mean"] + line["environments/reverse_text/reward_mean"])
        / 3
        for line in lines[:2]
    ]
    assert means == pytest.approx([line["reward/mean"] for line in lines[:2]], abs=1e-6)
    results = cli("status", run_id)
    assert set(results["held_out"]) == {
        "before",
        "after",
        "reverse_text before",
        "reverse_text after",
    }
    assert results["held_out"]["reverse_text after"] is not None
    log = cli("logs", run_id, "env-reverse_text")
    assert log["path"].endswith(f"env-reverse_text_{run_id}.log")
    assert (
        "allowed: api, trainer, env, engine, env-reverse_text"
        in cli("logs", run_id, "env-calm", expect=1)["error"]
    )


UPSTREAM = Path(__file__).resolve().parents[1] / "upstream"


def test_files_written_for_atropos_run_as_they_are(cli, served_home, wait_ended):
    """One turn with text tokenised again and no log-probabilities, two turns gathered by Atropos,
    and one of several files.
    """
    place = {"LACHESIS_ENVIRONMENTS": str(UPSTREAM)}
    classes = {
        environment["name"]: environment["class_name"]
        for environment in cli("env", "list", **place)["environments"]
    }
    assert classes.items() >= {
        ("word_length", "WordLengthEnv"),
        ("parity", "ParityEnv"),
        ("ladder", "LadderEnv"),
    }
    words = (
        "train",
        "word_length",
        "--with",
        "parity",
        "--with",
        "ladder",
        *SIZES,
        "--set",
        "total_steps=4",
    )
    run_id = cli(*words, "--model", "tiny", **place)["run_id"]
    wait_ended(run_id)
    assert record(served_home, run_id)["status"] == "completed", record(served_home, run_id)[
        "error"
    ]
    lines = MetricsFile(served_home / "runs" / run_id / "metrics.jsonl").read()
    assert len(lines) == 4
    for name in ("word_length", "parity", "ladder"):
        assert sum(line[f"environments/{name}/rollouts"] for line in lines) == 4 * 8
    assert sum(line["batch/without_logprobs"] for line in lines) > 0
    assert sum(line["batch/datums"] for line in lines) >= 4 * 8
    assert record(served_home, run_id)["additional_environments"].keys() == {"parity", "ladder"}
    tried = cli("status", run_id)
    assert not tried.get("rollouts", {}).get("invalid_reasons"), tried
