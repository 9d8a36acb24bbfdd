"""Describe a run's model services: embedded engine, or back end and bridge."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lachesis.config.backends import BACKENDS, Backend, find_uv, is_url
from lachesis.config.run_config import RunConfig
from lachesis.supervision.services.spec import (
    ReadinessCheck,
    ServiceSpec,
    make_http_readiness_check,
)
from lachesis.supervision.services.variables import (
    HOST,
    PYTHON_MODULE_COMMAND,
    is_local_model,
    make_model_hub_env,
    select_env_by_prefix,
)

# What a back end serves at once; more would be compiled or held in memory for nothing.
SKYRL_DEFAULTS = {
    "max_lora_adapters": 24,
    "sample_max_num_sequences": 128,
    "train_micro_batch_size": 64,
}
# A session without a sign of life of the bridge for this long is ended.
SESSION_TIMEOUT_S = 300
# Variables that tell a back end where its cards and its other hosts are.
PASSED_PREFIXES = ("JAX_", "XLA_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "RAY_", "HF_")


@dataclass(frozen=True)
class EnginePlace:
    """Say where an engine listens and keeps its files."""

    port: int
    backend_port: int
    token: str
    seed: int
    store_folder: Path
    backend_folder: Path
    log: Path
    backend_log: Path


def make_engine_services(config: RunConfig, place: EnginePlace) -> list[ServiceSpec]:
    """Describe the processes that hold a model on this machine, or the bridge to an engine."""
    backend = config.tinker.backend
    if not backend:
        return [
            make_engine_spec(
                config,
                place.port,
                place.token,
                place.seed,
                store_folder=place.store_folder,
                log=place.log,
            )
        ]
    if is_url(backend):
        return [_make_bridge_spec(config, place, backend, os.environ.get("TINKER_API_KEY", ""))]
    url = f"http://{HOST}:{place.backend_port}"
    return [
        _make_skyrl_spec(BACKENDS[backend], config, place),
        _make_bridge_spec(config, place, url, ""),
    ]


def make_engine_spec(
    config: RunConfig, port: int, token: str, seed: int, *, store_folder: Path, log: Path
) -> ServiceSpec:
    """Return the spec of the embedded engine: its command, port and variables."""
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
        [
            *command,
            *make_engine_memory_flags(config),
            "--store",
            str(store_folder),
            "--seed",
            str(seed),
        ],
        log=log,
        cwd=log.parent,
        env={"LACHESIS_ENGINE_TOKEN": token, **make_model_hub_env(config, weights=True)},
        port=port,
        check_ready=_make_engine_check(port, token),
        timeout_s=120.0
        if is_local_model(config)
        else 3600.0,  # a model by name is downloaded first
    )


def make_engine_memory_flags(config: RunConfig) -> list[str]:
    """Return the flags that say how a model is stored and what its memory is planned for."""
    tinker = config.tinker
    return [
        "--precision",
        tinker.precision,
        "--base-weights",
        tinker.base_weights,
        "--rank",
        str(tinker.lora_rank),
        "--sequence-tokens",
        str(tinker.max_token_trainer_length),
    ]


def _make_engine_check(port: int, token: str) -> ReadinessCheck:
    return make_http_readiness_check(
        f"http://{HOST}:{port}/api/v1/healthz", headers={"X-API-Key": token}
    )


def _make_bridge_spec(config: RunConfig, place: EnginePlace, url: str, key: str) -> ServiceSpec:
    """Describe the bridge to an engine; it is ready when the engine has trained something."""
    backend_flags = (
        []
        if is_url(config.tinker.backend)
        else ["--upstream-folder", str(_get_checkpoint_folder(place))]
    )
    return ServiceSpec(
        "engine",
        [
            *PYTHON_MODULE_COMMAND,
            "lachesis.skyrl_bridge",
            "--model",
            config.openai.model_name,
            "--upstream",
            url,
            *backend_flags,
            "--port",
            str(place.port),
            "--store",
            str(place.store_folder),
            "--rank",
            str(config.tinker.lora_rank),
        ],
        log=place.log,
        cwd=place.log.parent,
        env={
            "LACHESIS_ENGINE_TOKEN": place.token,
            "LACHESIS_BACKEND_KEY": key,
            **make_model_hub_env(config, weights=False),
        },
        port=place.port,
        check_ready=_make_engine_check(place.port, place.token),
        timeout_s=3600.0,  # the engine loads the model before it answers the bridge
    )


def _get_checkpoint_folder(place: EnginePlace) -> Path:
    return place.backend_folder / "checkpoints"


def _make_skyrl_spec(backend: Backend, config: RunConfig, place: EnginePlace) -> ServiceSpec:
    """Describe SkyRL's Tinker server with its JAX engine, from the environment of its own.

    It answers before its engine is there; the bridge waits for that.
    """
    settings = {
        **SKYRL_DEFAULTS,
        "max_lora_rank": config.tinker.lora_rank,
        **config.tinker.backend_config,
    }
    command = [find_uv(backend), "run", "--no-project", "-m", "skyrl.tinker.api"]
    flags = {
        "--backend": "jax",
        "--base-model": config.openai.model_name,
        "--host": HOST,
        "--port": str(place.backend_port),
        "--session-timeout-sec": str(SESSION_TIMEOUT_S),
        "--backend-config": json.dumps(settings),
        "--checkpoints-base": str(_get_checkpoint_folder(place)),
        "--database-url": f"sqlite:///{place.backend_folder / 'tinker.db'}",
    }
    return ServiceSpec(
        "backend",
        [*command, *(part for pair in flags.items() for part in pair)],
        log=place.backend_log,
        cwd=place.backend_folder,
        env=_make_backend_env(backend, config),
        port=place.backend_port,
        check_ready=make_http_readiness_check(f"http://{HOST}:{place.backend_port}/api/v1/healthz"),
        timeout_s=300.0,
    )


def _make_backend_env(backend: Backend, config: RunConfig) -> dict[str, str]:
    """Return the variables of a back end, whose programs are those of its own environment."""
    passed: Mapping[str, str] = {
        name: value
        for prefix in PASSED_PREFIXES
        for name, value in select_env_by_prefix(prefix).items()
    }
    return {
        # Without an address Ray would look for daemons that somebody else may have left behind.
        "RAY_ADDRESS": "local",
        **passed,
        **make_model_hub_env(config, weights=True),
        "VIRTUAL_ENV": str(backend.folder),
        "PATH": f"{backend.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        # Ray would start each worker by `uv run` again, in a folder that is no project.
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
