"""Build, check and store the configuration of a run, which all its processes read as YAML."""

import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from lachesis.base.errors import ConfigError, FieldValueError, StorageError, shorten
from lachesis.base.files import read_cached
from lachesis.base.json_text import Json
from lachesis.base.paths import to_safe_name
from lachesis.base.reward_values import is_score
from lachesis.config.backends import check_backend_name, find_ignored_fields
from lachesis.config.prices import Prices, find_hourly_price, find_prices
from lachesis.config.profiles import PROFILES, ProfileName, load_profile_values
from lachesis.config.run_fields import (
    EnvSection,
    LimitsSection,
    OpenAISection,
    RolloutsSection,
    Section,
    TinkerSection,
)
from lachesis.config.yaml_text import YAML_LOADER, dump_yaml
from lachesis.models.chat_template import build_template_kwargs
from lachesis.models.find_model import read_chat_template

# The largest weight of an environment among others.
MAX_WEIGHT = 1000


class RunConfig(Section):
    """Hold the configuration of one run.

    Combinations of values that would hang a run or drop every group are refused.
    """

    environment: str = Field(min_length=1)
    profile: ProfileName = "embedded"
    env: EnvSection = EnvSection()
    openai: OpenAISection = OpenAISection()
    tinker: TinkerSection = TinkerSection()
    limits: LimitsSection = LimitsSection()
    rollouts: RolloutsSection = RolloutsSection()
    slurm: Literal[False] = False
    """Whether Atropos takes its servers from Slurm."""
    testing: Literal[False] = False
    """Whether Atropos answers by itself, without a model."""

    prices: Prices | None = None
    """Prices of the base model's tokens at the start of the run; null when training is free or the
    prices are not known. No user sets it; see `lachesis.config.prices`.
    """

    @model_validator(mode="after")
    def _check_batch_size(self) -> Self:
        env = self.env
        if env.batch_size % env.group_size:
            raise ValueError(
                f"env.batch_size ({env.batch_size}) is not a multiple of env.group_size "
                f"({env.group_size}); Atropos would wait forever for a full batch"
            )
        return self

    @model_validator(mode="after")
    def _check_sequence_length(self) -> Self:
        longest, limit = self.env.max_token_length, self.tinker.max_token_trainer_length
        if longest >= limit:
            raise ValueError(
                f"env.max_token_length ({longest}) is not below tinker.max_token_trainer_length "
                f"({limit}); Atropos would drop every group with a rollout of the full length"
            )
        return self

    @model_validator(mode="after")
    def _check_tokenizer(self) -> Self:
        if self.env.tokenizer_name != self.openai.model_name:
            raise ValueError(
                f"env.tokenizer_name ({self.env.tokenizer_name}) and openai.model_name "
                f"({self.openai.model_name}) differ; token ids would mean different texts to the "
                "environment and to the model"
            )
        return self

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        """Check the engine that a run starts itself: profile, name, and ignored settings."""
        backend = self.tinker.backend
        if not backend:
            return self
        if self.profile != "custom":
            raise ValueError(
                f"tinker.backend is {backend} on profile {self.profile}; allowed: profile custom"
            )
        check_backend_name(backend)
        values = {f"tinker.{name}": value for name, value in self.tinker.model_dump().items()}
        if problems := find_ignored_fields(backend, values):
            raise ValueError("; ".join(problems))
        return self

    @property
    def has_own_engine(self) -> bool:
        """Return whether the run starts an engine, or a bridge to an engine, beside its trainer."""
        return self.profile == "embedded" or bool(self.tinker.backend)

    def without_backend(self) -> "RunConfig":
        """Return this configuration for the engine of this machine."""
        tinker = self.tinker.model_copy(update={"backend": "", "backend_config": {}})
        return self.model_copy(update={"tinker": tinker})

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        self.build_environment_configs()
        return self

    def build_environment_configs(self) -> "dict[str, RunConfig]":
        """Return the configuration that each environment of the run reads, by name, the first one
        first.

        Raises:
            ValueError: A field of `env.mixture` is not allowed.
        """
        env = self.env
        if not env.mixture:
            return {self.environment: self}
        if self.environment in env.mixture:
            raise ValueError(
                f"env.mixture names {self.environment}, which is the run's first environment; "
                "allowed: other environments"
            )
        values_by_name = {
            self.environment: {**(env.model_extra or {}), "weight": env.inference_weight},
            **env.mixture,
        }
        if len({to_safe_name(name) for name in values_by_name}) < len(values_by_name):
            raise ValueError(
                "env.mixture has names that differ in punctuation only: "
                f"{', '.join(values_by_name)}"
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
    ) -> "RunConfig":
        """Build one environment's configuration, with its share of the groups that may wait."""
        shared = {key: getattr(self.env, key) for key in EnvSection.model_fields}
        shared_names = sorted(own_values.keys() & (shared.keys() - {"max_token_length"}))
        if shared_names:
            raise ValueError(
                f"env.mixture.{name} sets {', '.join(shared_names)}, which all environments of a "
                "run share"
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
        """Return whether the trainer fetches a batch ahead, which is one of those that may wait."""
        return self.env.max_batches_offpolicy > 1

    @property
    def effective_loss(self) -> str:
        """Return the name of the loss.

        If batches may wait, they are off-policy by several updates, and `auto` means a loss with a
        bounded ratio.
        """
        automatic_loss = "ppo" if self.is_prefetching else "importance_sampling"
        return automatic_loss if self.tinker.loss_fn == "auto" else self.tinker.loss_fn

    def to_yaml(self) -> str:
        """Return the YAML that the trainer and the environment read.

        The endpoint is listed twice: with a single entry, environments that return a bare server
        configuration would talk to localhost:9004 instead.
        """
        endpoint = self.openai.model_dump(mode="json")
        meta_names = {"environment", "profile", "prices"}
        content = self.model_dump(mode="json", exclude={"openai", *meta_names})
        meta = self.model_dump(mode="json", include=meta_names, exclude_none=True)
        document = {**content, "openai": [endpoint, dict(endpoint)], "lachesis": meta}
        return dump_yaml(document)

    @classmethod
    def from_yaml(cls, path: Path) -> "RunConfig":
        """Read the configuration of a run.

        Raises:
            ConfigError: The content is not a valid configuration; the message names the file.
            StorageError: The file cannot be read.
        """
        content = _load_yaml(path)
        endpoint = content.pop("openai", None) or {} if isinstance(content, dict) else {}
        # Atropos takes a list of servers; ours holds the same one twice.
        endpoint = endpoint[0] if isinstance(endpoint, list) else endpoint
        if not isinstance(content, dict) or not all(
            isinstance(section or {}, dict) for section in (*content.values(), endpoint)
        ):
            raise ConfigError(f"{path} has no sections; expected: env, openai, tinker")
        meta = content.pop("lachesis", None) or {
            "environment": (content.get("env") or {}).get("wandb_name") or path.stem
        }
        sections = {
            key: content[key]
            for key in ("env", "tinker", "limits", "rollouts", "slurm", "testing")
            if key in content
        }
        values = {**sections, **meta, "openai": endpoint}
        return build_run_config(values, source=str(path))


def _load_yaml(path: Path) -> Any:
    try:
        return yaml.load(read_cached(path).decode("utf-8"), Loader=YAML_LOADER)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # A ValueError means that the file is not text, or holds a date that does not exist.
        raise ConfigError(f"{path} is not YAML: {error}") from error


def resolve_run_config(
    environment: str,
    profile: str,
    edits: Mapping[str, Mapping[str, Any]],
    *,
    defaults: Mapping[str, Any] | None = None,
    model: str | None = None,
    home: Path | None = None,
) -> RunConfig:
    """Build the configuration of a run: edits override the profile, which overrides the defaults.

    Args:
        environment: The name of the run's first environment.
        profile: Where training happens.
        edits: Values by section and field.
        defaults: The environment's own values of its own fields.
        model: The base model and its tokenizer; by default the profile's.
        home: The home folder, for the tables of an operator.

    Raises:
        ConfigError: A value, or the combination of several, cannot work.
    """
    values = load_profile_values(profile, home)
    own_defaults = {
        key: value for key, value in (defaults or {}).items() if key not in EnvSection.model_fields
    }
    sections: dict[str, dict[str, Any]] = {
        "env": {**own_defaults, **values.get("env", {})},
        **{name: values.get(name, {}) for name in ("openai", "tinker", "limits", "rollouts")},
    }
    # Later values replace earlier ones field by field, not section by section.
    for name, section in edits.items():
        sections[name] = {**sections[name], **section}
    _derive_values(sections, environment, model)
    base_model = sections["openai"].get("model_name", OpenAISection().model_name)
    prices = find_prices(base_model, home) if PROFILES[profile].is_paid else None
    return check_cost_limit(
        build_run_config(
            {"environment": environment, "profile": profile, "prices": prices, **sections}
        ),
        home,
    )


def _derive_values(
    sections: dict[str, dict[str, Any]], environment: str, model: str | None
) -> None:
    """Set values that follow from others or from the launch."""
    if "wandb" in (sections["tinker"].get("trackers") or ()):
        sections["tinker"]["use_wandb"] = True
    if sections["tinker"].get("use_wandb") is False:
        # Without W&B in the trainer the environment does not log to it either.
        sections["env"]["use_wandb"] = False
    # The Atropos API refuses an environment without a name.
    if sections["env"].get("wandb_name") is None:
        sections["env"]["wandb_name"] = f"{environment}-{datetime.now():%Y%m%d-%H%M%S}"
    if model:
        sections["env"]["tokenizer_name"] = sections["openai"]["model_name"] = model


def check_cost_limit(config: RunConfig, home: Path | None = None) -> RunConfig:
    """Return the configuration if its cost limit can be enforced.

    Raises:
        ConfigError: There is a limit and no price of the model is known.
    """
    if (
        config.limits.max_cost_usd is not None
        and PROFILES[config.profile].is_paid
        and config.prices is None
        and find_hourly_price(config.tinker.backend, home) is None
    ):
        raise ConfigError(
            "limits.max_cost_usd cannot be enforced: no price of "
            f"{config.openai.model_name} is known; add it, or the price of an hour of "
            "your back end, to $LACHESIS_HOME/prices.yaml, or use limits.max_tokens"
        )
    return config


def _read_weight(name: str, own_values: Mapping[str, Any]) -> float:
    """Return the weight of an environment in a mixture, or raise ValueError."""
    weight = own_values.get("weight", 1.0)
    if isinstance(weight, bool) or not is_score(weight) or not 0 < weight <= MAX_WEIGHT:
        raise ValueError(
            f"env.mixture.{name}.weight is {shorten(repr(weight), 40)}; allowed: above 0, at most "
            f"{MAX_WEIGHT}"
        )
    return float(weight)


def build_run_config(values: Mapping[str, Any], source: str = "") -> RunConfig:
    """Build a checked configuration from plain values.

    Raises:
        FieldValueError: The message names every wrong field, its value and what is allowed.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise FieldValueError(
            (f"{source}: " if source else "") + format_validation_error(error)
        ) from error


def format_validation_error(error: ValidationError) -> str:
    """Return pydantic's problems on one line: field, value, and the allowed values."""
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


def make_template_kwargs(template: str | None, config: RunConfig) -> Json:
    """Return the arguments of the chat template for a run.

    Args:
        template: The chat template of the run's model, or None if it has none.
        config: The configuration of the run.

    Raises:
        ConfigError: The template cannot switch thinking as the run asks for.
    """
    tinker = config.tinker
    try:
        return build_template_kwargs(template, tinker.thinking, tinker.chat_template_kwargs)
    except ValueError as error:
        raise ConfigError(
            f"tinker.thinking is {tinker.thinking!r}, and {config.openai.model_name} cannot do "
            f"that: {error}; `lachesis model show {config.openai.model_name}` says what it can, "
            "and tinker.chat_template_kwargs sets any other argument of its template"
        ) from error


def check_template_settings(config: RunConfig) -> None:
    """Check the settings against the chat template, if that is on this machine already.

    Raises:
        ConfigError: The template cannot switch thinking as the run asks for.
    """
    template = read_chat_template(config.openai.model_name)
    if template is not None:
        make_template_kwargs(template, config)
