"""Describe the services of an inference test: the process of the environment and its endpoint."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

import yaml

from lachesis.base.api_keys import read_key
from lachesis.base.errors import ConfigError
from lachesis.base.json_text import Json
from lachesis.base.secrets import read_passed_variables
from lachesis.config import run_config, yaml_text
from lachesis.config.launch_spec import TestSpec
from lachesis.config.profiles import get_endpoint_key_name
from lachesis.config.run_config import RunConfig
from lachesis.config.yaml_text import dump_yaml
from lachesis.inference_tests.store import get_environment_groups_file
from lachesis.supervision.process_marks import MARK_VARIABLE, build_mark
from lachesis.supervision.services.engine import EnginePlace, make_engine_services
from lachesis.supervision.services.plan import ServicePlan, with_env
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.supervision.services.spec import ServiceSpec, make_http_readiness_check
from lachesis.supervision.services.variables import (
    HOST,
    PYTHON_MODULE_COMMAND,
    make_dataset_hub_env,
    make_engine_client_env,
    make_inference_client_env,
    make_model_hub_env,
    make_python_command,
    make_template_settings_env,
    make_test_wandb_env,
    select_env_by_prefix,
)


def make_base_model_plan(
    config: RunConfig,
    folder: Path,
    seed: int = 0,
    *,
    weights: str | None = None,
    engine_store: Path | None = None,
    port: int | None = None,
    with_engine: bool = True,
) -> ServicePlan:
    """Plan an engine and an inference server for a model, to try it without training.

    Args:
        config: The configuration, which names the base model.
        folder: The folder of logs and files.
        seed: The seed of sampling.
        weights: The sampler weights to serve; by default the base model is served.
        engine_store: The folder with the engine's checkpoints; by default a new one.
        port: The port of the inference server; by default a free one.
        with_engine: Whether an engine of this machine samples; else the Tinker server that the
            variables of this process name.

    Returns:
        The plan, whose `client_env` is what its clients need in their environment.
    """
    engine_port, backend_port, free_port = reserve_free_ports(3)
    port = port or free_port
    values = config.model_dump()
    values["openai"]["base_url"] = f"http://{HOST}:{port}/v1"
    config = run_config.build_run_config(values)
    token, client_env = f"tml-{secrets.token_urlsafe(24)}", make_inference_client_env(port)
    file = folder / "server.yaml"
    mark_env = {MARK_VARIABLE: build_mark(folder.parent)}
    engines, server_env = [], {**select_env_by_prefix("TINKER_"), "TINKER_TELEMETRY": "0"}
    if with_engine:
        place = EnginePlace(
            port=engine_port,
            backend_port=backend_port,
            token=token,
            seed=seed,
            store_folder=engine_store or folder / "engine",
            backend_folder=folder / "backend",
            log=folder / "engine.log",
            backend_log=folder / "backend.log",
        )
        engines = [with_env(spec, mark_env) for spec in make_engine_services(config, place)]
        server_env = make_engine_client_env(engine_port, token)
    hub_env = make_model_hub_env(config, weights=False)
    env = {**hub_env, **server_env, **client_env, **mark_env}
    server = _make_inference_server_spec(file, port, env, weights)
    return ServicePlan(
        config,
        [*engines, server],
        trainer_url=f"http://{HOST}:{port}",
        files={file: config.to_yaml()},
        client_env=client_env,
        empty_folders=tuple(spec.cwd for spec in engines if spec.name == "backend"),
    )


def _make_inference_server_spec(
    config_file: Path, port: int, env: dict[str, str], weights: str | None
) -> ServiceSpec:
    """Describe the trainer's inference server without a trainer, with these weights if any."""
    flags = ["--base-only", *(["--weights", weights] if weights else [])]
    folder = config_file.parent
    return ServiceSpec(
        "inference",
        [*PYTHON_MODULE_COMMAND, "lachesis.trainer", "--config", str(config_file), *flags],
        log=folder / "inference.log",
        cwd=folder,
        env=env,
        port=port,
        check_ready=make_http_readiness_check(f"http://{HOST}:{port}/health"),
    )


def _select_hub_token(tokenizer_name: str) -> dict[str, str]:
    """Return the token of the Hub, unless the tokenizer is a local folder."""
    return {} if Path(tokenizer_name).is_dir() else select_env_by_prefix("HF_TOKEN")


def make_inference_test_spec(
    file: str,
    config_yaml: str,
    output: Path,
    spec: dict[str, Any],
    *,
    client_env: dict[str, str],
    timeout_s: float = 600.0,
) -> tuple[ServiceSpec, dict[Path, str]]:
    """Describe the environment's `process` command for one model of a test, and the files it reads.

    `client_env` holds the secrets of the model's server and is passed to this child only.
    """
    config_file, spec_file = output.with_suffix(".yaml"), output.with_suffix(".json")
    values = yaml.safe_load(config_yaml)
    env_values = values["env"]
    program = [*make_python_command(file), "lachesis.environment_process"]
    service = ServiceSpec(
        "environment",
        [*program, "inference-test", file, str(spec_file), "process", "--config", str(config_file)],
        log=output.with_suffix(".log"),
        cwd=output.parent,
        env={
            **_select_hub_token(env_values["tokenizer_name"]),
            **read_passed_variables(),
            **make_test_wandb_env(env_values["use_wandb"]),
            **make_template_settings_env(values.get("tinker") or {}),
            **client_env,
            MARK_VARIABLE: build_mark(output.parent),
        },
        timeout_s=timeout_s,
    )
    return service, {config_file: config_yaml, spec_file: json.dumps(spec)}


def make_stage_check_spec(
    file: str, class_name: str, config: RunConfig, folder: Path, out: Path
) -> tuple[ServiceSpec, dict[Path, str]]:
    """Describe the child that runs a test's stages without a model, and its file."""
    values = config.model_dump(mode="json")
    values["env"].update(use_wandb=False, data_path_to_save_groups=None)
    values["openai"] = [values["openai"], values["openai"]]
    config_file = folder / "check.yaml"
    program = [*make_python_command(file), "lachesis.environment_process"]
    service = ServiceSpec(
        "environment",
        [*program, "check", file, class_name, str(out), "--config", str(config_file)],
        log=folder / "check.log",
        cwd=folder,
        env={
            **make_dataset_hub_env(config),
            **make_template_settings_env(values["tinker"]),
            **read_passed_variables(),
            **make_test_wandb_env(False),
            MARK_VARIABLE: build_mark(folder),
        },
    )
    return service, {config_file: yaml_text.dump_yaml(values)}


OPENROUTER_URL = "https://openrouter.ai/api/v1"


def find_endpoint() -> tuple[str, dict[str, str]]:
    """Return the URL of the endpoint in this process's variables, and the variables by which the
    process of an environment gets its key.

    Raises:
        ConfigError: The URL is not one, or has a password, which would be in files.
    """
    import httpx

    url = (os.environ.get("OPENAI_BASE_URL") or OPENROUTER_URL).rstrip("/")
    try:
        parsed_url = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"$OPENAI_BASE_URL is not an address: {error}") from None
    if parsed_url.userinfo:
        raise ConfigError(
            f"$OPENAI_BASE_URL holds a user name or a password for {parsed_url.host}; set the "
            "address alone, and the key as $OPENAI_API_KEY"
        )
    return url, {
        "LACHESIS_INFERENCE_URL": url,
        "LACHESIS_INFERENCE_TOKEN": read_key(get_endpoint_key_name()),
        "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER": "1",
    }


def make_process_config(
    config: RunConfig,
    test_spec: TestSpec,
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
    groups = get_environment_groups_file(output) if test_spec.prompts else output
    content["env"].update(
        total_steps=test_spec.num_groups,
        group_size=test_spec.group_size,
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
