"""Write the configuration of Atropos' process command, which an inference test runs."""

from __future__ import annotations

from pathlib import Path

import yaml

from lachesis.base.json_text import Json
from lachesis.base.yaml_text import dump_yaml
from lachesis.config.run_config import RunConfig
from lachesis.validation.inference_tests import InferenceRequest, get_environment_groups_file


def make_process_config(
    config: RunConfig,
    request: InferenceRequest,
    output: Path,
    endpoint: Json,
    wandb_run: str,
    *,
    use_wandb: bool = False,
) -> str:
    """Return the YAML of the environment's `process` command for one model.

    `endpoint` has the fields of Atropos' server section. With `use_wandb` the environment logs to
    W&B, which is offline in a test.
    """
    content = yaml.safe_load(config.to_yaml())
    groups = get_environment_groups_file(output) if request.prompts else output
    content["env"].update(
        total_steps=request.num_steps,
        group_size=request.group_size,
        use_wandb=use_wandb,
        wandb_name=wandb_run,
        data_path_to_save_groups=str(groups),
        include_messages=True,
        ensure_scores_are_not_same=False,
        steps_per_eval=0,
    )
    content["openai"] = [endpoint, dict(endpoint)]
    return dump_yaml(content)


def make_remote_server_section(model: str, base_url: str) -> Json:
    """Return the server section for a model behind a URL with OpenAI's protocol."""
    return {
        "model_name": model,
        "base_url": base_url,
        "api_key": "x",  # The environment's process replaces it by the key in its variables.
        "server_type": "openai",
        "health_check": False,
        "timeout": 600,
        "num_max_requests_at_once": 64,
        "num_requests_for_eval": 64,
    }
