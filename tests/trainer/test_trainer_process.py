"""The trainer as a process: every way to fail ends it non-zero with the reason as its last line."""

import os
import socket
import subprocess
import sys

import pytest

from lachesis.config import run_config as run_config
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.trainer.__main__ import parse_args, read_config


def write(folder, model, **addresses):
    urls = {
        "rollout_server_url": "http://127.0.0.1:9",
        "base_url": f"http://127.0.0.1:{reserve_free_ports(1)[0]}/v1",
        **addresses,
    }
    edits = {
        "env": {"rollout_server_url": urls["rollout_server_url"], "batch_size": 4, "group_size": 2},
        "openai": {"base_url": urls["base_url"]},
        "tinker": {"use_wandb": False},
    }
    file = folder / "config.yaml"
    file.write_text(
        run_config.resolve_run_config("arithmetic", "embedded", edits, model=model).to_yaml()
    )
    return file


def run(file, **env):
    command = [sys.executable, "-m", "lachesis.trainer", "--config", str(file)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **env}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=50
    )


def last_line(done):
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_a_missing_model_is_named(tmp_path):
    assert "the tokenizer of /no/such/model" in last_line(run(write(tmp_path, "/no/such/model")))


def test_a_missing_key_is_named(tmp_path, random_model):
    assert last_line(run(write(tmp_path, random_model))).startswith(
        "missing_key: the Tinker client refuses its key"
    )


def test_a_taken_port_is_named(tmp_path, random_model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        message = last_line(run(write(tmp_path, random_model, base_url=url)))
    assert message.startswith("config: the inference server cannot listen on 127.0.0.1:")


def test_an_api_that_is_not_there_is_named(tmp_path, engine):
    done = run(
        write(tmp_path, engine.model), TINKER_BASE_URL=engine.url, TINKER_API_KEY=engine.token
    )
    assert (
        last_line(done)
        == "server_down: the Atropos API at http://127.0.0.1:9 does not answer /reset_data: "
        "ConnectError"
    )


def test_the_command_line_overrides_the_file(tmp_path, random_model):
    file = write(tmp_path, random_model)
    options = (
        "--lora-rank 8 --learning-rate 0.01 --num-steps 3 --batch-size 8 --group-size 4 "
        "--wandb-project p --no-wandb"
    )
    config = read_config(
        parse_args(
            ["--config", str(file), *options.split(), "--base-model", "m", "--wandb-group", "g"]
        )
    )
    assert (config.tinker.lora_rank, config.tinker.learning_rate, config.tinker.use_wandb) == (
        8,
        0.01,
        False,
    )
    assert (config.env.total_steps, config.env.batch_size, config.env.group_size) == (3, 8, 4)
    assert (config.openai.model_name, config.tinker.wandb_project, config.tinker.wandb_group) == (
        "m",
        "p",
        "g",
    )


@pytest.mark.parametrize("content", ["- a list", "env: {group_size: x}", "{"])
def test_a_bad_file_is_named(tmp_path, content):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    assert str(file) in last_line(run(file))
