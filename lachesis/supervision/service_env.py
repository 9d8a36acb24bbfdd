"""Choose the interpreter and the environment variables of each service."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from lachesis.base.model_files import is_cached
from lachesis.base.secrets import read_passed_variables, read_public_variables
from lachesis.catalog.requirements import find_interpreter
from lachesis.config.run_config import RunConfig

HOST = "127.0.0.1"


# -P: a folder of the run must not be importable
PYTHON_MODULE_COMMAND = (sys.executable, "-P", "-m")


def make_inference_client_env(port: int) -> dict[str, str]:
    """What the inference server at this port asks for, made for this attempt, and its clients send."""
    return {
        "LACHESIS_INFERENCE_URL": f"http://{HOST}:{port}",
        "LACHESIS_INFERENCE_TOKEN": secrets.token_urlsafe(24),
    }


def make_engine_client_env(port: int, token: str) -> dict[str, str]:
    return {
        "TINKER_TELEMETRY": "0",
        "TINKER_BASE_URL": f"http://{HOST}:{port}",
        "TINKER_API_KEY": token,
    }


def make_python_command(file: str) -> tuple[str, ...]:
    """As PYTHON, with the packages that the environment requires."""
    return (find_interpreter(Path(file)), *PYTHON_MODULE_COMMAND[1:])


def is_local_model(config: RunConfig) -> bool:
    return Path(config.openai.model_name).is_dir()


def make_model_hub_env(config: RunConfig, *, weights: bool) -> dict[str, str]:
    """Return what a process needs of the hub to load the model's tokenizer, or also its weights.

    A model that is on this machine needs none, and without a network asking for it would cost
    minutes of retries; another one may need the user's token.
    """
    if is_local_model(config) or is_cached(config.openai.model_name, needs_weights=weights):
        return {"HF_HUB_OFFLINE": "1"}
    return select_env_by_prefix("HF_TOKEN")


def make_dataset_hub_env(config: RunConfig) -> dict[str, str]:
    """For an environment, whose data set may come from the hub also where the model does not; with
    a token when the model's does, or by LACHESIS_PASS.
    """
    return {} if is_local_model(config) else select_env_by_prefix("HF_TOKEN")


def make_run_wandb_env(in_use: bool) -> dict[str, str]:
    """Return W&B's variables for an environment in a run. It has no key, so that it logs offline;
    the trainer's log is the one that is sent. Only $LACHESIS_PASS gives an environment the key.
    """
    if not in_use:
        return {}
    mode = "disabled" if os.environ.get("WANDB_MODE") == "disabled" else "offline"
    return {
        **read_public_variables("WANDB_"),
        **({} if "WANDB_API_KEY" in read_passed_variables() else {"WANDB_MODE": mode}),
    }


def make_test_wandb_env(in_use: bool) -> dict[str, str]:
    """Return W&B's variables for an environment that is checked or tested: it never waits for W&B's
    server.
    """
    return {
        **(read_public_variables("WANDB_") if in_use else {}),
        "WANDB_MODE": "offline" if in_use else "disabled",
    }


def select_env_by_prefix(prefix: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}
