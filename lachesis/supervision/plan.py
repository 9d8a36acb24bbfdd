"""From a run's configuration to its ordered services, with real ports, tokens and commands."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import yaml

from lachesis.base.errors import ConfigError
from lachesis.base.files import write_private
from lachesis.base.model_files import is_cached
from lachesis.base.secrets import read_passed_variables, read_public_variables
from lachesis.base.tls import get_tls_context
from lachesis.catalog.requirements import find_interpreter
from lachesis.config import run_config as run_config
from lachesis.config.run_config import RunConfig
from lachesis.runs.leftovers import MARK_VARIABLE, build_mark
from lachesis.runs.store import RunDir, RunRecord
from lachesis.supervision.health import make_http_readiness_check
from lachesis.supervision.process import (
    ReadinessCheck,
    ServiceSpec,
    get_service_role,
    reserve_free_ports,
)

HOST = "127.0.0.1"
# -P: a folder of the run must not be importable
PYTHON_MODULE_COMMAND = (sys.executable, "-P", "-m")
START_ORDER = ("engine", "api", "trainer", "environment")


@dataclass(frozen=True)
class ServicePlan:
    """The services of one run in the order of their start."""

    config: RunConfig
    services: list[ServiceSpec]
    evaluations: dict[str, ServiceSpec] = field(default_factory=dict)
    trainer_url: str = ""
    files: dict[Path, str] = field(default_factory=dict)
    """What the services read, by path."""
    client_env: dict[str, str] = field(default_factory=dict)

    def write_files(self) -> None:
        """Put the files where the services look for them. Raises StorageError."""
        for path, text in self.files.items():
            write_private(path, text)

    @property
    def environment_names(self) -> dict[str, str]:
        """The names of the run's environments, by service, in the order of their start."""
        return dict(
            zip(
                (
                    spec.name
                    for spec in self.services
                    if get_service_role(spec.name) == "environment"
                ),
                self.config.build_environment_configs(),
                strict=True,
            )
        )

    def make_restart_spec(self, service: str, *, groups: int, env_id: int) -> ServiceSpec:
        """An environment, to go on after so many groups that training has received, as the API's
        environment of this number.
        """
        spec = self.get_service(service)
        ready = _make_registration_check(self.config.env.rollout_server_url, env_id)
        return replace(
            spec, env={**spec.env, "LACHESIS_CURSOR_GROUPS": str(groups)}, check_ready=ready
        )

    def get_service(self, name: str) -> ServiceSpec:
        return next(spec for spec in self.services if spec.name == name)


def make_training_plan(
    record: RunRecord,
    folder: RunDir,
    config: RunConfig,
    *,
    received_groups: Mapping[str, int] | None = None,
) -> ServicePlan:
    """Choose ports, put them into the run's configuration, and name every command; nothing is
    written yet. The token of the engine is made here and goes to the two children that need it,
    through their environment only. For a run that goes on from a checkpoint `resume` has the
    numbers of groups that training had received by then, by environment. Raises ConfigError if the
    configuration was edited to have other environments than the run began with.
    """
    if set(config.build_environment_configs()) != set(record.environment_files):
        original_names, current_names = (
            ", ".join(record.environment_files),
            ", ".join(config.build_environment_configs()),
        )
        raise ConfigError(
            f"{folder.config} has the environments {current_names}; allowed: those the run began with ({original_names})"
        )
    ports = dict(zip(START_ORDER, reserve_free_ports(3), strict=False))
    config = _with_addresses(config, folder, ports)
    files = {folder.config: config.to_yaml()}
    token, client_env = (
        f"tml-{secrets.token_urlsafe(24)}",
        _make_inference_client_env(ports["trainer"]),
    )
    services = [
        _make_api_spec(config, folder, ports["api"]),
        _make_trainer_spec(
            record, config, folder, ports, token, resume=received_groups is not None
        ),
    ]
    if record.profile == "embedded":
        engine = _make_engine_spec(
            config,
            ports["engine"],
            token,
            record.seed,
            store_folder=folder.engine,
            log=folder.get_log_file("engine"),
        )
        services.insert(0, engine)
    evaluations = {}
    trainer_url = f"http://{HOST}:{ports['trainer']}"
    for env_id, (name, part) in enumerate(config.build_environment_configs().items()):
        environment = _EnvironmentServices(
            env_id,
            name,
            part,
            record.environment_files[name],
            folder,
            is_mixed=bool(config.env.mixture),
        )
        files[environment.config_file] = part.to_yaml()
        services.append(environment.make_serve_spec(groups=(received_groups or {}).get(name, 0)))
        if config.tinker.final_evaluation:
            for when, url in (
                ("before", f"{trainer_url}/base/v1"),
                ("after", config.openai.base_url),
            ):
                evaluations[when + environment.name_suffix], file = (
                    environment.make_evaluation_spec(when)
                )
                files[file] = environment.make_evaluation_yaml(when, url)
    client_roles = ("trainer", "environment", "evaluate")
    services, evaluation_specs = (
        [
            _with_env(
                spec,
                {
                    MARK_VARIABLE: build_mark(folder.path),
                    **(client_env if get_service_role(spec.name) in client_roles else {}),
                },
            )
            for spec in specs
        ]
        for specs in (services, evaluations.values())
    )
    return ServicePlan(
        config, services, dict(zip(evaluations, evaluation_specs, strict=True)), trainer_url, files
    )


def _with_env(spec: ServiceSpec, env: dict[str, str]) -> ServiceSpec:
    return replace(spec, env={**spec.env, **env})


def _make_inference_client_env(port: int) -> dict[str, str]:
    """What the inference server at this port asks for, made for this attempt, and its clients send."""
    return {
        "LACHESIS_INFERENCE_URL": f"http://{HOST}:{port}",
        "LACHESIS_INFERENCE_TOKEN": secrets.token_urlsafe(24),
    }


def make_base_model_plan(config: RunConfig, folder: Path, seed: int = 0) -> ServicePlan:
    """An engine and an inference server for the configuration's base model, to try it without
    training. `client` of the plan is what its clients need in their environment.
    """
    engine_port, port = reserve_free_ports(2)
    values = config.model_dump()
    values["openai"]["base_url"] = f"http://{HOST}:{port}/v1"
    config = run_config.build_run_config(values)
    token, client_env = f"tml-{secrets.token_urlsafe(24)}", _make_inference_client_env(port)
    file = folder / "server.yaml"
    engine = _make_engine_spec(
        config, engine_port, token, seed, store_folder=folder / "engine", log=folder / "engine.log"
    )
    mark_env = {MARK_VARIABLE: build_mark(folder.parent)}
    server = ServiceSpec(
        "inference",
        [*PYTHON_MODULE_COMMAND, "lachesis.trainer", "--config", str(file), "--base-only"],
        log=folder / "inference.log",
        cwd=folder,
        env={
            **_make_model_hub_env(config, weights=False),
            **_make_engine_client_env(engine_port, token),
            **client_env,
            **mark_env,
        },
        port=port,
        check_ready=make_http_readiness_check(f"http://{HOST}:{port}/health"),
    )
    return ServicePlan(
        config,
        [_with_env(engine, mark_env), server],
        trainer_url=f"http://{HOST}:{port}",
        files={file: config.to_yaml()},
        client_env=client_env,
    )


def _make_engine_client_env(port: int, token: str) -> dict[str, str]:
    return {
        "TINKER_TELEMETRY": "0",
        "TINKER_BASE_URL": f"http://{HOST}:{port}",
        "TINKER_API_KEY": token,
    }


def _with_addresses(config: RunConfig, folder: RunDir, ports: dict[str, int]) -> RunConfig:
    values = config.model_dump()
    values["env"]["rollout_server_url"] = f"http://{HOST}:{ports['api']}"
    values["openai"]["base_url"] = f"http://{HOST}:{ports['trainer']}/v1"
    values["tinker"]["checkpoint_dir"] = str(folder.checkpoints)
    return run_config.build_run_config(values)


def _make_engine_spec(
    config: RunConfig, port: int, token: str, seed: int, *, store_folder: Path, log: Path
) -> ServiceSpec:
    command = [
        *PYTHON_MODULE_COMMAND,
        "lachesis.engine",
        "--model",
        config.openai.model_name,
        "--port",
        str(port),
    ]
    return ServiceSpec(
        "engine",
        [*command, "--store", str(store_folder), "--seed", str(seed)],
        log=log,
        cwd=log.parent,
        env={"LACHESIS_ENGINE_TOKEN": token, **_make_model_hub_env(config, weights=True)},
        port=port,
        check_ready=make_http_readiness_check(
            f"http://{HOST}:{port}/api/v1/healthz", headers={"X-API-Key": token}
        ),
        timeout_s=120.0 if _is_local(config) else 3600.0,  # a model by name is downloaded first
    )


def _make_api_spec(config: RunConfig, folder: RunDir, port: int) -> ServiceSpec:
    fetches_ahead = int(config.is_prefetching)
    batch_flags = [
        "--offpolicy",
        str(config.env.max_batches_offpolicy - fetches_ahead),
        "--ahead",
        str(fetches_ahead),
    ]
    environment_flags = (
        ["--environments", str(len(config.build_environment_configs()))]
        if config.env.mixture
        else []
    )
    return ServiceSpec(
        "api",
        [
            *PYTHON_MODULE_COMMAND,
            "lachesis.rollout_api.app",
            "--port",
            str(port),
            *batch_flags,
            *environment_flags,
        ],
        log=folder.get_log_file("api"),
        cwd=folder.path,
        port=port,
        check_ready=make_http_readiness_check(f"http://{HOST}:{port}/"),
    )


def _make_trainer_spec(
    record: RunRecord,
    config: RunConfig,
    folder: RunDir,
    ports: dict[str, int],
    token: str,
    *,
    resume: bool,
) -> ServiceSpec:
    url = f"http://{HOST}:{ports['trainer']}"
    env = {
        **_make_model_hub_env(config, weights=False),
        **(_select_env_by_prefix("WANDB_") if config.tinker.use_wandb else {}),
    }
    if record.profile == "embedded":
        env |= _make_engine_client_env(ports["engine"], token)
    else:
        env |= {**_select_env_by_prefix("TINKER_"), "TINKER_TELEMETRY": "0"}
    flags = [
        *(["--resume"] if resume else []),
        *(["--hold"] if config.tinker.final_evaluation else []),
    ]
    return ServiceSpec(
        "trainer",
        [*PYTHON_MODULE_COMMAND, "lachesis.trainer", "--config", str(folder.config), *flags],
        log=folder.get_log_file("trainer"),
        cwd=folder.path,
        env=env,
        port=ports["trainer"],
        check_ready=make_http_readiness_check(
            f"{url}/health", expect=lambda health: health.get("trainer_initialized") is True
        ),
        timeout_s=120.0 if record.profile == "embedded" else 600.0,
        # told to end, it finishes its step and saves a checkpoint
        grace_s=60.0 if record.profile == "embedded" else 180.0,
    )


@dataclass(frozen=True)
class _EnvironmentServices:
    """One environment of a run; `config` is its own view of the run's configuration."""

    env_id: int
    name: str
    config: RunConfig
    file: str
    folder: RunDir
    is_mixed: bool
    """Whether others feed the same run."""

    @property
    def name_suffix(self) -> str:
        """What its files and services are called by, beside those of the first one."""
        return f"-{run_config.to_safe_name(self.name)}" if self.env_id else ""

    @property
    def service_name(self) -> str:
        return f"environment{self.name_suffix}"

    @property
    def config_file(self) -> Path:
        return (
            self.folder.path / f"{self.service_name}.yaml" if self.is_mixed else self.folder.config
        )

    def make_serve_spec(self, *, groups: int) -> ServiceSpec:
        env = self.config.env
        name_env = {"LACHESIS_ENVIRONMENT": self.name} if self.is_mixed else {}
        state_env = {
            "LACHESIS_TALLY": str(self.folder.get_counters_file(self.service_name)),
            "LACHESIS_CURSOR": str(self.folder.get_position_file(self.service_name)),
            "LACHESIS_CURSOR_GROUPS": str(groups),
        }
        return ServiceSpec(
            self.service_name,
            [
                *_make_python_command(self.file),
                "lachesis.env_process",
                "run",
                self.file,
                "serve",
                "--config",
                str(self.config_file),
            ],
            log=self.folder.get_log_file(self.service_name),
            cwd=self.folder.path,
            env={
                **_make_dataset_hub_env(self.config),
                **_make_run_wandb_env(env.use_wandb),
                **read_passed_variables(),
                **state_env,
                **name_env,
            },
            check_ready=_make_registration_check(env.rollout_server_url, self.env_id),
            timeout_s=300.0,  # setup() may load a data set
        )

    def make_evaluation_yaml(self, when: str, base_url: str) -> str:
        values: dict[str, Any] = self.config.model_dump()
        values["openai"]["base_url"] = base_url
        values["env"].update(
            data_dir_to_save_evals=str(self.folder.evaluation / f"{when}{self.name_suffix}"),
            use_wandb=False,
        )
        return run_config.build_run_config(values).to_yaml()

    def make_evaluation_spec(self, when: str) -> tuple[ServiceSpec, Path]:
        """The environment's own `evaluate` command, against the base model or the trained one, and
        the file that it reads.
        """
        file = self.folder.path / f"evaluate_{when}{self.name_suffix}.yaml"
        spec = ServiceSpec(
            f"evaluate-{when}{self.name_suffix}",
            [
                *_make_python_command(self.file),
                "lachesis.env_process",
                "run",
                self.file,
                "evaluate",
                "--config",
                str(file),
            ],
            log=self.folder.logs / f"evaluate_{when}{self.name_suffix}_{self.folder.path.name}.log",
            cwd=self.folder.path,
            env={**_make_dataset_hub_env(self.config), **read_passed_variables()},
            timeout_s=600.0,
        )
        return spec, file


def _make_registration_check(api_url: str, env_id: int) -> ReadinessCheck:
    return make_http_readiness_check(
        f"{api_url}/status-env",
        body={"env_id": env_id},
        error_prefix="not registered yet, setup() may still run; ",
    )


def make_inference_test_spec(
    file: str,
    config_yaml: str,
    output: Path,
    spec: dict[str, Any],
    *,
    client_env: dict[str, str],
    timeout_s: float = 600.0,
) -> tuple[ServiceSpec, dict[Path, str]]:
    """The environment's `process` command for one model of an inference test, and the files it
    reads. `client` holds the secrets of the model's server and goes through the environment of this
    child only.
    """
    config_file, spec_file = output.with_suffix(".yaml"), output.with_suffix(".json")
    env_values = yaml.safe_load(config_yaml)["env"]
    is_local = Path(env_values["tokenizer_name"]).is_dir()
    service = ServiceSpec(
        "environment",
        [
            *_make_python_command(file),
            "lachesis.env_process",
            "probe",
            file,
            str(spec_file),
            "process",
            "--config",
            str(config_file),
        ],
        log=output.with_suffix(".log"),
        cwd=output.parent,
        env={
            **({} if is_local else _select_env_by_prefix("HF_TOKEN")),
            **read_passed_variables(),
            **_make_test_wandb_env(env_values["use_wandb"]),
            **client_env,
            MARK_VARIABLE: build_mark(output.parent),
        },
        timeout_s=timeout_s,
    )
    return service, {config_file: config_yaml, spec_file: json.dumps(spec)}


def make_stage_check_spec(
    file: str, class_name: str, config: RunConfig, folder: Path, out: Path
) -> tuple[ServiceSpec, dict[Path, str]]:
    """The child that goes through the stages of a validation that need no model, and the file it
    reads.
    """
    values = config.model_dump(mode="json")
    values["env"].update(use_wandb=False, data_path_to_save_groups=None)
    values["openai"] = [values["openai"], values["openai"]]
    config_file = folder / "check.yaml"
    service = ServiceSpec(
        "environment",
        [
            *_make_python_command(file),
            "lachesis.env_process",
            "check",
            file,
            class_name,
            str(out),
            "--config",
            str(config_file),
        ],
        log=folder / "check.log",
        cwd=folder,
        env={
            **_make_dataset_hub_env(config),
            **read_passed_variables(),
            **_make_test_wandb_env(False),
            MARK_VARIABLE: build_mark(folder),
        },
    )
    return service, {config_file: run_config.dump_yaml(values)}


def _make_python_command(file: str) -> tuple[str, ...]:
    """As PYTHON, with the packages that the environment requires."""
    return (find_interpreter(Path(file)), *PYTHON_MODULE_COMMAND[1:])


def _is_local(config: RunConfig) -> bool:
    return Path(config.openai.model_name).is_dir()


def _make_model_hub_env(config: RunConfig, *, weights: bool) -> dict[str, str]:
    """Return what a process needs of the hub to load the model's tokenizer, or also its weights.

    A model that is on this machine needs none, and without a network asking for it would cost
    minutes of retries; another one may need the user's token.
    """
    if _is_local(config) or is_cached(config.openai.model_name, needs_weights=weights):
        return {"HF_HUB_OFFLINE": "1"}
    return _select_env_by_prefix("HF_TOKEN")


def _make_dataset_hub_env(config: RunConfig) -> dict[str, str]:
    """For an environment, whose data set may come from the hub also where the model does not; with
    a token when the model's does, or by LACHESIS_PASS.
    """
    return {} if _is_local(config) else _select_env_by_prefix("HF_TOKEN")


def _make_run_wandb_env(in_use: bool) -> dict[str, str]:
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


def _make_test_wandb_env(in_use: bool) -> dict[str, str]:
    """Return W&B's variables for an environment that is checked or tested: it never waits for W&B's
    server.
    """
    return {
        **(read_public_variables("WANDB_") if in_use else {}),
        "WANDB_MODE": "offline" if in_use else "disabled",
    }


def _select_env_by_prefix(prefix: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def fetch_trainer_health(plan: ServicePlan) -> dict[str, Any]:
    """What the trainer says about itself; empty when it does not answer."""
    try:
        response = httpx.get(
            f"{plan.trainer_url}/health", timeout=3.0, trust_env=False, verify=get_tls_context()
        )
        content = response.json()
    except (httpx.HTTPError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def count_registered_environments(plan: ServicePlan) -> int:
    """How many environments the API has met; the number of the next one. 0 when it does not answer."""
    try:
        response = httpx.get(
            f"{plan.config.env.rollout_server_url}/counts",
            timeout=3.0,
            trust_env=False,
            verify=get_tls_context(),
        )
        return int(response.json()["registered"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return 0


def disconnect_environment(plan: ServicePlan, env_id: int) -> None:
    """Tell the API that this environment is gone; else the next one would get a share of the work
    only.
    """
    with contextlib.suppress(httpx.HTTPError):
        url = f"{plan.config.env.rollout_server_url}/disconnect-env"
        httpx.post(
            url, json={"env_id": env_id}, timeout=3.0, trust_env=False, verify=get_tls_context()
        )
