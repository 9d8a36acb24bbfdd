"""The configuration of a run: its sections, which values are locked and why, and the YAML that all
its processes read.

A profile says where training happens and what its users may change:

    embedded   the engine of this project on this machine; no key, no cost
    tinker     the Tinker cloud
    custom     any other server that speaks the Tinker protocol
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from lachesis.base.errors import ConfigError, FieldValueError, StorageError, shorten
from lachesis.base.paths import to_safe_name
from lachesis.base.yaml_text import YAML_LOADER, dump_yaml
from lachesis.config.prices import find_prices
from lachesis.config.profiles import PROFILES, ProfileName, load_profile_values
from lachesis.config.schema import (
    INFRASTRUCTURE,
    EnvSection,
    LimitsSection,
    OpenAISection,
    Section,
    TinkerSection,
)

MAX_WEIGHT = 1000
"""Of an environment, beside others."""


class RunConfig(Section):
    """One run. Combinations that would hang or drop every group cannot be built."""

    environment: str = Field(min_length=1)
    profile: ProfileName = "embedded"
    env: EnvSection = EnvSection()
    openai: OpenAISection = OpenAISection()
    tinker: TinkerSection = TinkerSection()
    limits: LimitsSection = LimitsSection()
    slurm: Annotated[Literal[False], INFRASTRUCTURE] = False
    """Whether Atropos takes its servers from Slurm."""
    testing: Annotated[Literal[False], INFRASTRUCTURE] = False
    """Whether Atropos answers by itself, without a model."""

    @model_validator(mode="after")
    def _check_batch_size(self) -> Self:
        env = self.env
        if env.batch_size % env.group_size:
            raise ValueError(
                f"env.batch_size ({env.batch_size}) is no multiple of env.group_size ({env.group_size}); "
                "Atropos would wait for a full batch for ever"
            )
        return self

    @model_validator(mode="after")
    def _check_sequence_length(self) -> Self:
        longest, limit = self.env.max_token_length, self.tinker.max_token_trainer_length
        if longest >= limit:
            raise ValueError(
                f"env.max_token_length ({longest}) is not below tinker.max_token_trainer_length ({limit}); "
                "Atropos would drop every group that has a full-length rollout"
            )
        return self

    @model_validator(mode="after")
    def _check_tokenizer(self) -> Self:
        if self.env.tokenizer_name != self.openai.model_name:
            raise ValueError(
                f"env.tokenizer_name ({self.env.tokenizer_name}) and openai.model_name ({self.openai.model_name}) differ; "
                "token ids would mean different texts to the environment and to the model"
            )
        return self

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        self.build_environment_configs()
        return self

    def build_environment_configs(self) -> dict[str, RunConfig]:
        """What each environment of the run reads, by its name, the run's first one first. Raises
        ValueError.
        """
        env = self.env
        if not env.mixture:
            return {self.environment: self}
        if self.environment in env.mixture:
            raise ValueError(
                f"env.mixture names {self.environment}, which is the run's own environment; allowed: others"
            )
        values_by_name = {
            self.environment: {**(env.model_extra or {}), "weight": env.inference_weight},
            **env.mixture,
        }
        if len({to_safe_name(name) for name in values_by_name}) < len(values_by_name):
            raise ValueError(
                f"env.mixture has names that differ in signs only: {', '.join(values_by_name)}"
            )
        weights = {
            name: _read_weight(name, own_values) for name, own_values in values_by_name.items()
        }
        groups_per_weight = (
            env.max_batches_offpolicy * env.batch_size / env.group_size / sum(weights.values())
        )
        return {
            name: self._build_environment_config(
                name, own_values, weights[name], math.ceil(groups_per_weight * weights[name])
            )
            for name, own_values in values_by_name.items()
        }

    def _build_environment_config(
        self, name: str, own_values: Mapping[str, Any], weight: float, max_workers: int
    ) -> RunConfig:
        """One environment's view: it has no more groups under way than is its share of what may
        wait.
        """
        shared = {key: getattr(self.env, key) for key in EnvSection.model_fields}
        shared_names = sorted(own_values.keys() & (shared.keys() - {"max_token_length"}))
        if shared_names:
            raise ValueError(
                f"env.mixture.{name} sets {', '.join(shared_names)}, which all environments of a run have in common"
            )
        shared |= {"mixture": {}, "inference_weight": weight, "max_num_workers": max_workers}
        if name != self.environment and self.env.wandb_name:
            shared["wandb_name"] = f"{self.env.wandb_name}-{to_safe_name(name)}"
        env = {**shared, **{key: value for key, value in own_values.items() if key != "weight"}}
        try:
            return RunConfig.model_validate({**self.model_dump(), "environment": name, "env": env})
        except ValidationError as error:
            raise ValueError(f"env.mixture.{name}: {format_validation_error(error)}") from None

    @property
    def is_prefetching(self) -> bool:
        """Whether the trainer holds one of the batches that may wait."""
        return self.env.max_batches_offpolicy > 1

    def to_yaml(self) -> str:
        """The file that the trainer and the environment read. The endpoint stands twice: with a
        single entry, environments that return a bare server configuration would talk to
        localhost:9004 instead.
        """
        endpoint = self.openai.model_dump(mode="json")
        content = self.model_dump(mode="json", exclude={"openai", "environment", "profile"})
        meta = {"environment": self.environment, "profile": self.profile}
        document = {**content, "openai": [endpoint, dict(endpoint)], "lachesis": meta}
        return dump_yaml(document)

    @classmethod
    def from_yaml(cls, path: Path) -> RunConfig:
        """Read a run's file. Raises ConfigError that names the file."""
        try:
            content = yaml.load(path.read_text(encoding="utf-8"), Loader=YAML_LOADER)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            # ValueError: no text, or no such day
            raise ConfigError(f"{path} is not YAML: {error}") from error
        endpoint = content.pop("openai", None) or {} if isinstance(content, dict) else {}
        endpoint = endpoint[0] if isinstance(endpoint, list) else endpoint
        if not isinstance(content, dict) or not all(
            isinstance(section or {}, dict) for section in (*content.values(), endpoint)
        ):
            raise ConfigError(f"{path} holds no sections; expected: env, openai, tinker")
        meta = content.pop("lachesis", None) or {
            "environment": (content.get("env") or {}).get("wandb_name") or path.stem
        }
        sections = {
            key: content[key]
            for key in ("env", "tinker", "limits", "slurm", "testing")
            if key in content
        }
        values = {**sections, **meta, "openai": endpoint}
        return build_run_config(values, source=str(path))


def resolve_run_config(
    environment: str,
    profile: str,
    edits: Mapping[str, Mapping[str, Any]],
    *,
    defaults: Mapping[str, Any] | None = None,
    model: str | None = None,
    home: Path | None = None,
) -> RunConfig:
    """The run's configuration: the environment's own `defaults`, the profile's values over them,
    `edits` over those.

    `model` names the base model and its tokenizer. Raises ConfigError; see `build`.
    """
    values = load_profile_values(profile, home)
    own_defaults = {
        key: value for key, value in (defaults or {}).items() if key not in EnvSection.model_fields
    }
    env = {**own_defaults, **values.get("env", {})}
    sections = {
        "env": env,
        **{name: values.get(name, {}) for name in ("openai", "tinker", "limits")},
    }
    for name, section in edits.items():
        sections[name] = {**sections[name], **section}
    if sections["tinker"].get("use_wandb") is False:
        # the environment's own logging goes with the trainer's
        sections["env"]["use_wandb"] = False
    # the Atropos API takes no environment without a name
    if sections["env"].get("wandb_name") is None:
        sections["env"]["wandb_name"] = f"{environment}-{datetime.now():%Y%m%d-%H%M%S}"
    if model:
        sections["env"]["tokenizer_name"] = sections["openai"]["model_name"] = model
    if PROFILES[profile].is_paid:
        base_model = sections["openai"].get("model_name", OpenAISection().model_name)
        sections["tinker"].setdefault("prices", find_prices(base_model, home))
    return check_cost_limit(
        build_run_config({"environment": environment, "profile": profile, **sections})
    )


def check_cost_limit(config: RunConfig) -> RunConfig:
    """The configuration, if its budget of money can be kept. Raises ConfigError."""
    if (
        config.limits.max_cost_usd is not None
        and PROFILES[config.profile].is_paid
        and config.tinker.prices is None
    ):
        raise ConfigError(
            f"limits.max_cost_usd cannot be kept: no price of {config.openai.model_name} is known; add it to "
            "$LACHESIS_HOME/prices.yaml, or use limits.max_tokens"
        )
    return config


def _read_weight(name: str, own_values: Mapping[str, Any]) -> float:
    weight = own_values.get("weight", 1.0)
    if (
        isinstance(weight, bool)
        or not isinstance(weight, int | float)
        or not 0 < weight <= MAX_WEIGHT
    ):
        raise ValueError(
            f"env.mixture.{name}.weight is {shorten(repr(weight), 40)}; allowed: above 0, at most {MAX_WEIGHT}"
        )
    return float(weight)


def build_run_config(values: Mapping[str, Any], source: str = "") -> RunConfig:
    """A checked configuration. Raises FieldValueError that names every field which is wrong, its
    value and what is allowed.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise FieldValueError(
            (f"{source}: " if source else "") + format_validation_error(error)
        ) from error


def format_validation_error(error: ValidationError) -> str:
    """Pydantic's findings in one line: field, value, what is allowed."""
    lines = []
    for error_detail in error.errors():
        field_path = ".".join(map(str, error_detail["loc"]))
        message = error_detail["msg"].removeprefix("Value error, ")
        if error_detail["type"] == "missing":
            lines.append(f"{field_path} is missing")
            continue
        lines.append(
            f"{field_path} is {shorten(repr(error_detail['input']))}: {message}"
            if field_path
            else message
        )
    return "; ".join(lines)
