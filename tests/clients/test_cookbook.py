"""Programs that others have written for Tinker, unmodified: the supervised loop, the reinforcement
loop and direct preference optimisation of `tinker-cookbook`. Only the address, the model and the
data are ours: a tiny model lies in a cache of Hugging Face under the name of a large one, and the
data sets are folders of the names that the programs ask for.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        importlib.util.find_spec("tinker_cookbook") is None,
        reason="tinker-cookbook is not installed (make install does it)",
    ),
]
MODEL = "Qwen/Qwen3-8B-Base"
COMMIT = "0" * 40


@pytest.fixture(scope="module")
def hub(random_model, tmp_path_factory):
    """A cache of the Hugging Face Hub that has one model."""
    cache = tmp_path_factory.mktemp("hub")
    folder = cache / "hub" / f"models--{MODEL.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / COMMIT).symlink_to(random_model)
    return cache


@pytest.fixture(scope="module")
def server(hub, start_engine):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(hub))
        return start_engine(MODEL)


@pytest.fixture
def play(server, hub, tmp_path):
    """Run a module of the cookbook with some settings, in a folder with data sets; the metrics it
    has written.
    """

    def run(module, data, **settings):
        for name, rows in data.items():
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
            (tmp_path / name / "test.jsonl").write_text("\n".join(map(json.dumps, rows[:2])))
            splits = "\n".join(
                f"  - split: {split}\n    path: {split}.jsonl" for split in ("train", "test")
            )
            (tmp_path / name / "README.md").write_text(
                f"---\nconfigs:\n- config_name: main\n  default: true\n  "
                f"data_files:\n{splits}\n---\n"
            )
        common = {"base_url": server.url, "model_name": MODEL, "log_path": tmp_path / "log"}
        command = [
            sys.executable,
            "-m",
            module,
            *(f"{key}={value}" for key, value in {**common, **settings}.items()),
        ]
        env = {
            **os.environ,
            "TINKER_API_KEY": server.token,
            "HF_HOME": str(hub),
            "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
            "HF_HUB_OFFLINE": "1",
            "HOME": str(tmp_path),
        }
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=380
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return [
            json.loads(line)
            for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()
        ]

    return run


def said(role, content):
    return {"role": role, "content": content}


@pytest.mark.long
def test_the_supervised_loop_learns(play: Callable[..., list[dict[str, Any]]]) -> None:
    rows = [
        {"messages": [said("user", f"Say {n}"), said("assistant", f"I say {n}.")]}
        for n in range(64)
    ]
    found = play(
        "tinker_cookbook.recipes.sl_loop",
        {"HuggingFaceH4/no_robots": rows},
        batch_size=8,
        learning_rate=0.01,
        save_every=3,
    )
    assert len(found) == 8
    assert found[-1]["train_mean_nll"] < 0.8 * found[0]["train_mean_nll"]


@pytest.mark.long
@pytest.mark.parametrize("loss_fn", ["importance_sampling", "cispo", "gspo"])
def test_the_reinforcement_loop_runs(
    play: Callable[..., list[dict[str, Any]]], loss_fn: str
) -> None:
    """A model without training is never right, so nothing is learned; sampling, checkpoints and the
    loop are real.
    """
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(8)]
    settings = {
        "batch_size": 4,
        "group_size": 4,
        "max_tokens": 8,
        "save_every": 1,
        "max_steps": 2,
        "loss_fn": loss_fn,
    }
    found = play("tinker_cookbook.recipes.rl_loop", {"openai/gsm8k": rows}, **settings)
    assert [line["progress/batch"] for line in found] == [0, 1]
    assert all(line["reward/total"] == 0.0 for line in found)


@pytest.mark.long
def test_direct_preference_optimisation_learns(play: Callable[..., list[dict[str, Any]]]) -> None:
    """Before the first step both models are the same, so the loss is ln 2; then what is preferred
    becomes more likely.
    """
    rows = [
        {
            "chosen": f"\n\nHuman: Say {n}\n\nAssistant: I say {n}.",
            "rejected": f"\n\nHuman: Say {n}\n\nAssistant: No, never.",
        }
        for n in range(1100)
    ]
    found = play(
        "tinker_cookbook.recipes.preference.dpo.train",
        {"Anthropic/hh-rlhf": rows},
        batch_size=8,
        max_steps=6,
        learning_rate=0.003,
        behavior_if_log_dir_exists="delete",
    )
    losses = [line["dpo_loss"] for line in found if "dpo_loss" in line]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < 0.6
