"""Describe each service of a training run: command, variables, port and readiness check."""

from dataclasses import dataclass
from pathlib import Path

from lachesis.base import paths
from lachesis.base.secrets import read_passed_variables
from lachesis.config.run_config import RunConfig
from lachesis.runs.folder import RunDir
from lachesis.runs.record import RunRecord
from lachesis.supervision.services.spec import (
    ReadinessCheck,
    ServiceSpec,
    make_http_readiness_check,
)
from lachesis.supervision.services.variables import (
    HOST,
    PYTHON_MODULE_COMMAND,
    make_dataset_hub_env,
    make_engine_client_env,
    make_model_hub_env,
    make_python_command,
    make_run_wandb_env,
    make_template_settings_env,
    select_env_by_prefix,
)


def make_api_spec(config: RunConfig, folder: RunDir, port: int) -> ServiceSpec:
    """Return the spec of the rollout API: its command, port and variables."""
    fetches_ahead = int(config.is_prefetching)
    batch_flags = [
        "--offpolicy",
        str(config.env.max_batches_offpolicy - fetches_ahead),
        "--ahead",
        str(fetches_ahead),
    ]
    if config.env.mixture:
        environment_flags = ["--environments", str(len(config.build_environment_configs()))]
    else:
        environment_flags = []
    return ServiceSpec(
        "api",
        [
            *PYTHON_MODULE_COMMAND,
            "lachesis.rollout_api.routes",
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


def make_trainer_spec(
    record: RunRecord,
    config: RunConfig,
    folder: RunDir,
    ports: dict[str, int],
    token: str,
    *,
    resume: bool,
) -> ServiceSpec:
    """Return the spec of the trainer: its command, port and variables."""
    url = f"http://{HOST}:{ports['trainer']}"
    config_file = folder.get_attempt_config(record.attempt)
    env = {
        **make_model_hub_env(config, weights=False),
        **(select_env_by_prefix("WANDB_") if config.tinker.use_wandb else {}),
        **(select_env_by_prefix("TRACKIO_") if "trackio" in config.tinker.trackers else {}),
    }
    if config.has_own_engine:
        env |= make_engine_client_env(ports["engine"], token)
    else:
        env |= {**select_env_by_prefix("TINKER_"), "TINKER_TELEMETRY": "0"}
    has_apart_base = config.tinker.final_evaluation and not record.starts_from_base
    flags = [*(["--resume"] if resume else []), *(["--evaluate-base"] if has_apart_base else [])]
    return ServiceSpec(
        "trainer",
        [
            *PYTHON_MODULE_COMMAND,
            *("lachesis.trainer", "--config", str(config_file), "--run-folder", str(folder.path)),
            *flags,
        ],
        log=folder.get_log_file("trainer"),
        cwd=folder.path,
        env=env,
        port=ports["trainer"],
        check_ready=make_http_readiness_check(
            f"{url}/health", expect=lambda health: health.get("trainer_initialized") is True
        ),
        timeout_s=120.0 if record.profile == "embedded" else 600.0,
        # After SIGTERM the trainer finishes its step and saves a checkpoint.
        grace_s=60.0 if record.profile == "embedded" else 180.0,
    )


@dataclass(frozen=True)
class EnvironmentServices:
    """Describe the processes of one environment of a run; `config` is its own configuration."""

    env_id: int
    name: str
    config: RunConfig
    file: str
    folder: RunDir
    attempt_config: Path
    """The configuration of the whole run in this attempt."""
    is_mixed: bool
    """Whether several environments feed the run."""

    @property
    def name_suffix(self) -> str:
        """Return the suffix of its files and services, empty for the first environment."""
        if self.env_id:
            return f"-{paths.to_safe_name(self.name)}"
        return ""

    @property
    def service_name(self) -> str:
        """Return the name of its service."""
        return f"environment{self.name_suffix}"

    @property
    def config_file(self) -> Path:
        """Return the file of its configuration."""
        if self.is_mixed:
            return self.attempt_config.with_name(f"{self.service_name}.yaml")
        return self.attempt_config

    def make_serve_spec(self, *, groups: int) -> ServiceSpec:
        """Return the spec of the process that makes rollouts in an environment."""
        env = self.config.env
        name_env = {"LACHESIS_ENVIRONMENT": self.name} if self.is_mixed else {}
        state_env = {
            "LACHESIS_COUNTERS_FILE": str(self.folder.get_counters_file(self.service_name)),
            "LACHESIS_POSITION_FILE": str(self.folder.get_position_file(self.service_name)),
            "LACHESIS_TRAINED_GROUPS": str(groups),
        }
        if env.steps_per_eval > 0 or self.config.tinker.final_evaluation:
            state_env["LACHESIS_EVALUATION_FOLDER"] = str(
                self.folder.evaluation / self.name_suffix.removeprefix("-")
            )
        return ServiceSpec(
            self.service_name,
            make_environment_command(self.file, "serve", self.config_file),
            log=self.folder.get_log_file(self.service_name),
            cwd=self.folder.path,
            env={
                **make_dataset_hub_env(self.config),
                **make_template_settings_env(self.config.tinker.model_dump()),
                **make_run_wandb_env(env.use_wandb),
                **read_passed_variables(),
                **state_env,
                **name_env,
            },
            check_ready=make_registration_check(env.rollout_server_url, self.env_id),
            timeout_s=300.0,  # The environment may load a data set in setup().
        )


def make_environment_command(file: str, command: str, config_file: Path) -> list[str]:
    """Return the command line that runs one of Atropos' commands of an environment's file."""
    program = [*make_python_command(file), "lachesis.environment_process", "run", file]
    return [*program, command, "--config", str(config_file)]


def make_registration_check(api_url: str, env_id: int) -> ReadinessCheck:
    """Return a check that succeeds once the API has registered the environment of this id."""
    return make_http_readiness_check(
        f"{api_url}/status-env",
        body={"env_id": env_id},
        error_prefix="not registered yet, setup() may still run; ",
    )
