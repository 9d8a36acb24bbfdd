"""Plan a run's services in order, with real ports, tokens and commands."""

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lachesis.base.errors import ConfigError
from lachesis.base.files import make_private_folder, storage_errors, write_private
from lachesis.config import run_config
from lachesis.config.run_config import RunConfig
from lachesis.runs.folder import RunDir
from lachesis.runs.record import RunRecord
from lachesis.supervision.process_marks import MARK_VARIABLE, build_mark
from lachesis.supervision.services.engine import EnginePlace, make_engine_services
from lachesis.supervision.services.order import PORT_NAMES, get_service_role
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.supervision.services.spec import ServiceSpec
from lachesis.supervision.services.training import (
    EnvironmentServices,
    make_api_spec,
    make_registration_check,
    make_trainer_spec,
)
from lachesis.supervision.services.variables import HOST, make_inference_client_env


@dataclass(frozen=True)
class ServicePlan:
    """Hold the services of one run in the order of their start."""

    config: RunConfig
    services: list[ServiceSpec]
    trainer_url: str = ""
    files: dict[Path, str] = field(default_factory=dict)
    """Contents of the files that the services read, by path."""
    client_env: dict[str, str] = field(default_factory=dict)
    empty_folders: tuple[Path, ...] = ()
    """Folders that begin empty at each start."""

    def write_files(self) -> None:
        """Write the files that the services read.

        Raises:
            StorageError: The disk refused a write.
        """
        for path, text in self.files.items():
            with storage_errors(path):
                make_private_folder(path.parent)
            write_private(path, text)
        for folder in self.empty_folders:
            with storage_errors(folder):
                shutil.rmtree(folder, ignore_errors=True)
                make_private_folder(folder)

    @property
    def environment_names(self) -> dict[str, str]:
        """Return the names of the run's environments by service, in the order of their start."""
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
        """Return the spec that restarts an environment.

        It skips the `groups` that training has received, and is ready once the API has registered
        it under the id `env_id`.
        """
        spec = self.get_service(service)
        ready = make_registration_check(self.config.env.rollout_server_url, env_id)
        return replace(
            spec, env={**spec.env, "LACHESIS_TRAINED_GROUPS": str(groups)}, check_ready=ready
        )

    def get_service(self, name: str) -> ServiceSpec:
        """Return the spec of the service of this name."""
        return next(spec for spec in self.services if spec.name == name)


def _require_original_environments(record: RunRecord, folder: RunDir, config: RunConfig) -> None:
    """Raise ConfigError when the configuration has other environments than the run began with."""
    current_names = config.build_environment_configs()
    if set(current_names) != set(record.environment_files):
        raise ConfigError(
            f"{folder.find_effective_config()} has the environments {', '.join(current_names)}; "
            f"allowed: those the run began with ({', '.join(record.environment_files)})"
        )


def make_training_plan(
    record: RunRecord,
    folder: RunDir,
    config: RunConfig,
    *,
    received_groups: Mapping[str, int] | None = None,
) -> ServicePlan:
    """Choose ports, put them into the configuration of the attempt, and describe every service.

    Nothing is written. The token of the engine is created here and passed to the two children that
    need it, through their environment only.

    Args:
        record: The run.
        folder: Its folder.
        config: Its configuration.
        received_groups: For a resumed run, how many groups training had received from each
            environment.

    Raises:
        ConfigError: The configuration has other environments than the run began with.
    """
    _require_original_environments(record, folder, config)
    config = _decide_on_wandb(folder, config)
    ports = dict(zip(PORT_NAMES, reserve_free_ports(len(PORT_NAMES)), strict=True))
    config = _with_addresses(config, folder, ports)
    token = f"tml-{secrets.token_urlsafe(24)}"
    services = [
        make_api_spec(config, folder, ports["api"]),
        make_trainer_spec(record, config, folder, ports, token, resume=received_groups is not None),
    ]
    if config.has_own_engine:
        place = _make_engine_place(record, folder, ports, token)
        services[:0] = make_engine_services(config, place)
    environments = _list_environment_services(record, folder, config)
    for environment in environments:
        groups = (received_groups or {}).get(environment.name, 0)
        services.append(environment.make_serve_spec(groups=groups))
    trainer_url = f"http://{HOST}:{ports['trainer']}"
    client_env = make_inference_client_env(ports["trainer"])
    return ServicePlan(
        config,
        [_add_run_context(spec, folder, client_env) for spec in services],
        trainer_url,
        files={
            folder.get_attempt_config(record.attempt): config.to_yaml(),
            folder.get_attempt_plan(record.attempt): _describe_plan(ports, services),
            **{
                environment.config_file: environment.config.to_yaml()
                for environment in environments
            },
        },
        empty_folders=tuple(spec.cwd for spec in services if spec.name == "backend"),
    )


def _describe_plan(ports: Mapping[str, int], services: list[ServiceSpec]) -> str:
    """Return where the services of an attempt run, as JSON; secrets are in their variables only."""
    content = {
        "host": HOST,
        "ports": dict(ports),
        "services": [
            {
                "name": spec.name,
                "command": spec.argv,
                "folder": str(spec.cwd),
                "log": str(spec.log),
                "port": spec.port,
            }
            for spec in services
        ],
    }
    return json.dumps(content, indent=2)


def _decide_on_wandb(folder: RunDir, config: RunConfig) -> RunConfig:
    """Return the configuration with W&B if there is a key or a mode for it, where nobody has said.

    A run that has logged to W&B before goes on with it.
    """
    if config.tinker.use_wandb is not None:
        return config
    # The flow has the variables of `lachesis serve`, whose key the trainer gets.
    has_variables = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE")
    is_used = bool(has_variables) or (folder.path / "wandb").is_dir()
    values = config.model_dump()
    values["tinker"]["use_wandb"] = is_used
    values["env"]["use_wandb"] &= is_used
    return run_config.build_run_config(values)


def _list_environment_services(
    record: RunRecord, folder: RunDir, config: RunConfig
) -> list[EnvironmentServices]:
    """Return the services of each environment, with its part of the configuration."""
    is_mixed = bool(config.env.mixture)
    return [
        EnvironmentServices(
            env_id,
            name,
            part,
            record.environment_files[name],
            folder,
            folder.get_attempt_config(record.attempt),
            is_mixed=is_mixed,
        )
        for env_id, (name, part) in enumerate(config.build_environment_configs().items())
    ]


def _make_engine_place(
    record: RunRecord, folder: RunDir, ports: Mapping[str, int], token: str
) -> EnginePlace:
    """Return the place of the run's engine, which keeps its checkpoints in the run's folder."""
    return EnginePlace(
        port=ports["engine"],
        backend_port=ports["backend"],
        token=token,
        seed=record.seed,
        store_folder=folder.engine,
        backend_folder=folder.backend,
        log=folder.get_log_file("engine"),
        backend_log=folder.get_log_file("backend"),
    )


def _add_run_context(spec: ServiceSpec, folder: RunDir, client_env: dict[str, str]) -> ServiceSpec:
    """Return the spec with the mark of the run, the command that shows its log, and the inference
    variables if it needs them.
    """
    is_client = get_service_role(spec.name) in ("trainer", "environment")
    env = {MARK_VARIABLE: build_mark(folder.path), **(client_env if is_client else {})}
    log_command = f"lachesis logs {folder.path.name} {folder.get_log_name(spec.log)}"
    return replace(with_env(spec, env), log_command=log_command)


def with_env(spec: ServiceSpec, env: dict[str, str]) -> ServiceSpec:
    """Return the spec with more environment variables."""
    return replace(spec, env={**spec.env, **env})


def _with_addresses(config: RunConfig, folder: RunDir, ports: dict[str, int]) -> RunConfig:
    values = config.model_dump()
    values["env"]["rollout_server_url"] = f"http://{HOST}:{ports['api']}"
    values["openai"]["base_url"] = f"http://{HOST}:{ports['trainer']}/v1"
    values["tinker"]["checkpoint_dir"] = str(folder.checkpoints)
    return run_config.build_run_config(values)
