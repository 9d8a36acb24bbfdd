"""Choose the interpreter and the environment variables of each service."""

import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lachesis.base.secrets import read_passed_variables, read_public_variables
from lachesis.config.run_config import RunConfig
from lachesis.environment_catalog.requirements import find_interpreter
from lachesis.models.find_model import is_cached

HOST = "127.0.0.1"
# With -P Python does not import modules from the run's folder.
PYTHON_MODULE_COMMAND = (sys.executable, "-P", "-m")


def make_inference_client_env(port: int) -> dict[str, str]:
    """Return the URL of the inference server and a new token, for the server and its clients."""
    return {
        "LACHESIS_INFERENCE_URL": f"http://{HOST}:{port}",
        "LACHESIS_INFERENCE_TOKEN": secrets.token_urlsafe(24),
    }


def make_engine_client_env(port: int, token: str) -> dict[str, str]:
    """Return the variables of a client of the embedded engine."""
    return {
        "TINKER_TELEMETRY": "0",
        "TINKER_BASE_URL": f"http://{HOST}:{port}",
        "TINKER_API_KEY": token,
    }


def make_template_settings_env(tinker: Mapping[str, Any]) -> dict[str, str]:
    """Return the variable by which an environment's process knows how the run renders prompts."""
    settings = {name: tinker.get(name) for name in ("thinking", "chat_template_kwargs")}
    return {"LACHESIS_TEMPLATE_SETTINGS": json.dumps(settings)}


def make_python_command(file: str) -> tuple[str, ...]:
    """Return the command of a Python that has the packages the environment requires."""
    return (find_interpreter(Path(file)), *PYTHON_MODULE_COMMAND[1:])


def is_local_model(config: RunConfig) -> bool:
    """Return whether the model is a folder on this machine."""
    return Path(config.openai.model_name).is_dir()


def make_model_hub_env(config: RunConfig, *, weights: bool) -> dict[str, str]:
    """Return the variables that a process needs to load the model's tokenizer, or also its weights.

    A model on this machine needs no Hub, and without a network each request would cost minutes of
    retries; any other may need the user's token.
    """
    if is_local_model(config) or is_cached(config.openai.model_name, needs_weights=weights):
        return {"HF_HUB_OFFLINE": "1"}
    return select_env_by_prefix("HF_TOKEN")


def make_dataset_hub_env(config: RunConfig) -> dict[str, str]:
    """Return the variables with which an environment loads its data set.

    The data set may come from the Hub even if the model does not. The token is included if the
    model comes from the Hub too; otherwise $LACHESIS_ENVIRONMENT_VARIABLES can pass it.
    """
    if is_local_model(config):
        return {}
    return select_env_by_prefix("HF_TOKEN")


def make_run_wandb_env(in_use: bool) -> dict[str, str]:
    """Return W&B's variables for an environment in a run.

    It logs offline because it has no key; the trainer's log is uploaded. Only
    $LACHESIS_ENVIRONMENT_VARIABLES can pass the key.
    """
    if not in_use:
        return {}
    if os.environ.get("WANDB_MODE") == "disabled":
        mode = "disabled"
    else:
        mode = "offline"
    return {
        **read_public_variables("WANDB_"),
        **({} if "WANDB_API_KEY" in read_passed_variables() else {"WANDB_MODE": mode}),
    }


def make_test_wandb_env(in_use: bool) -> dict[str, str]:
    """Return W&B's variables for an environment under test, which never waits for W&B's server."""
    return {
        **(read_public_variables("WANDB_") if in_use else {}),
        "WANDB_MODE": "offline" if in_use else "disabled",
    }


def select_env_by_prefix(prefix: str) -> dict[str, str]:
    """Return this process's variables whose names begin with `prefix`."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}
