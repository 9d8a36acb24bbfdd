"""The configuration of a run: its sections, which values are locked and why, and the YAML that all its processes read.

A profile says where training happens and what its users may change:

    embedded   the engine of this project on this machine; no key, no cost
    tinker     the Tinker cloud
    custom     any other server that speaks the Tinker protocol
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from lachesis.base import paths
from lachesis.base.errors import ConfigError, FieldValueError, StorageError, shorten
from lachesis.config.prices import price_of
from lachesis.config.schema import INFRASTRUCTURE, EnvSection, LimitsSection, OpenAISection, Section, TinkerSection

ProfileName = Literal["embedded", "tinker", "custom"]


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The monitor reads the configurations of a hundred runs per tick; the one in C takes a tenth of the time."""
MOST_WEIGHT = 1000
"""Of an environment, beside others."""
_LINE_ENDS = re.compile(r"[\r\x85\u2028\u2029\ufeff]")


class _Dumper(yaml.SafeDumper):
    """Writes texts so that they are read again as they were."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Without double quotes YAML reads these characters as the end of a line, and folds them.
    style = '"' if _LINE_ENDS.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump_yaml(content: Any) -> str:
    """Write plain data as YAML, in the order it has, from which every reader gets the same data."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


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
    def _batches_can_form(self) -> Self:
        env = self.env
        if env.batch_size % env.group_size:
            raise ValueError(
                f"env.batch_size ({env.batch_size}) is no multiple of env.group_size ({env.group_size}); "
                "Atropos would wait for a full batch for ever"
            )
        return self

    @model_validator(mode="after")
    def _sequences_fit_the_trainer(self) -> Self:
        longest, limit = self.env.max_token_length, self.tinker.max_token_trainer_length
        if longest >= limit:
            raise ValueError(
                f"env.max_token_length ({longest}) is not below tinker.max_token_trainer_length ({limit}); "
                "Atropos would drop every group that has a full-length rollout"
            )
        return self

    @model_validator(mode="after")
    def _one_tokenizer(self) -> Self:
        if self.env.tokenizer_name != self.openai.model_name:
            raise ValueError(
                f"env.tokenizer_name ({self.env.tokenizer_name}) and openai.model_name ({self.openai.model_name}) differ; "
                "token ids would mean different texts to the environment and to the model"
            )
        return self

    @model_validator(mode="after")
    def _environments_fit(self) -> Self:
        self.parts()
        return self

    def parts(self) -> dict[str, RunConfig]:
        """What each environment of the run reads, by its name, the run's first one first. Raises ValueError."""
        env = self.env
        if not env.mixture:
            return {self.environment: self}
        if self.environment in env.mixture:
            raise ValueError(f"env.mixture names {self.environment}, which is the run's own environment; allowed: others")
        values = {self.environment: {**(env.model_extra or {}), "weight": env.inference_weight}, **env.mixture}
        if len({plain(name) for name in values}) < len(values):
            raise ValueError(f"env.mixture has names that differ in signs only: {', '.join(values)}")
        weights = {name: _weight(name, own) for name, own in values.items()}
        groups = env.max_batches_offpolicy * env.batch_size / env.group_size / sum(weights.values())
        return {name: self._part(name, own, weights[name], math.ceil(groups * weights[name])) for name, own in values.items()}

    def _part(self, name: str, own: Mapping[str, Any], weight: float, workers: int) -> RunConfig:
        """One environment's view: it has no more groups under way than is its share of what may wait."""
        shared = {key: getattr(self.env, key) for key in EnvSection.model_fields}
        common = sorted(own.keys() & (shared.keys() - {"max_token_length"}))
        if common:
            raise ValueError(f"env.mixture.{name} sets {', '.join(common)}, which all environments of a run have in common")
        shared |= {"mixture": {}, "inference_weight": weight, "max_num_workers": workers}
        if name != self.environment and self.env.wandb_name:
            shared["wandb_name"] = f"{self.env.wandb_name}-{plain(name)}"
        env = {**shared, **{key: value for key, value in own.items() if key != "weight"}}
        try:
            return RunConfig.model_validate({**self.model_dump(), "environment": name, "env": env})
        except ValidationError as error:
            raise ValueError(f"env.mixture.{name}: {explain(error)}") from None

    @property
    def fetches_ahead(self) -> bool:
        """Whether the trainer holds one of the batches that may wait."""
        return self.env.max_batches_offpolicy > 1

    def to_yaml(self) -> str:
        """The file that the trainer and the environment read. The endpoint stands twice: with a single entry, environments
        that return a bare server configuration would talk to localhost:9004 instead."""
        endpoint = self.openai.model_dump(mode="json")
        content = self.model_dump(mode="json", exclude={"openai", "environment", "profile"})
        meta = {"environment": self.environment, "profile": self.profile}
        whole = {**content, "openai": [endpoint, dict(endpoint)], "lachesis": meta}
        return dump_yaml(whole)

    @classmethod
    def from_yaml(cls, path: Path) -> RunConfig:
        """Read a run's file. Raises ConfigError that names the file."""
        try:
            content = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no text, or no such day
            raise ConfigError(f"{path} is not YAML: {error}") from error
        endpoint = content.pop("openai", None) or {} if isinstance(content, dict) else {}
        endpoint = endpoint[0] if isinstance(endpoint, list) else endpoint
        if not isinstance(content, dict) or not all(isinstance(one or {}, dict) for one in (*content.values(), endpoint)):
            raise ConfigError(f"{path} holds no sections; expected: env, openai, tinker")
        meta = content.pop("lachesis", None) or {"environment": (content.get("env") or {}).get("wandb_name") or path.stem}
        known = {key: content[key] for key in ("env", "tinker", "limits", "slurm", "testing") if key in content}
        values = {**known, **meta, "openai": endpoint}
        return build(values, where=str(path))


@dataclass(frozen=True)
class Profile:
    """Where training happens: the values of its fields, those of the locked ones that it opens, and the keys it needs."""

    name: ProfileName
    description: str
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    unlocked: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ()

    @property
    def paid(self) -> bool:
        """Whether somebody may be billed: the servers that ask for a key."""
        return bool(self.keys)


_TUNABLE = frozenset(
    f"tinker.{name}" for name in ("lora_rank", "learning_rate", "max_token_trainer_length", "save_checkpoint_interval")
) | frozenset(
    f"env.{name}" for name in ("total_steps", "max_token_length", "steps_per_eval", "max_batches_offpolicy", "worker_timeout")
)
PROFILES: dict[str, Profile] = {
    "embedded": Profile(
        "embedded",
        "the engine of this project on this machine; no key, no cost",
        values={
            "env": {
                "total_steps": 300,
                "use_wandb": False,
                "max_token_length": 128,
                "max_num_workers": 64,
                "steps_per_eval": 0,
                "max_batches_offpolicy": 1,
                "worker_timeout": 600,
            },
            "openai": {"num_requests_for_eval": 4, "timeout": 600},
            "tinker": {
                "learning_rate": 1.5e-3,
                "max_token_trainer_length": 512,
                "final_evaluation": True,
            },
        },
        unlocked=_TUNABLE,
    ),
    "tinker": Profile("tinker", "the Tinker cloud", keys=("TINKER_API_KEY",)),
    "custom": Profile(
        "custom",
        "another server that speaks the Tinker protocol",
        unlocked=_TUNABLE,
        keys=("TINKER_BASE_URL", "TINKER_API_KEY"),
    ),
}


def profile_values(profile: str, home: Path | None = None) -> dict[str, dict[str, Any]]:
    """A profile's values, with an operator's own from `$LACHESIS_HOME/profiles.yaml` over them:

    tinker: {tinker: {lora_rank: 16}, env: {total_steps: 500}}

    Raises ConfigError for an unknown profile or a file of another shape.
    """
    if profile not in PROFILES:
        raise ConfigError(
            f"there is no profile {shorten(repr(profile), 60)}; allowed: {', '.join(PROFILES)}", available=list(PROFILES)
        )
    values = {name: dict(section) for name, section in PROFILES[profile].values.items()}
    file = (home or paths.home()) / "profiles.yaml"
    if file.is_file():
        try:
            for name, section in ((yaml.safe_load(file.read_text()) or {}).get(profile) or {}).items():
                if name not in ("env", "openai", "tinker", "limits"):
                    raise ValueError(f"there is no section {name}; allowed: env, openai, tinker, limits")
                values.setdefault(name, {}).update(section)
        except (yaml.YAMLError, AttributeError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is not of the form profile: {{section: {{field: value}}}}: {error}") from error
    return values


def resolve(
    environment: str,
    profile: str,
    edits: Mapping[str, Mapping[str, Any]],
    *,
    defaults: Mapping[str, Any] | None = None,
    model: str | None = None,
    home: Path | None = None,
) -> RunConfig:
    """The run's configuration: the environment's own `defaults`, the profile's values over them, `edits` over those.

    `model` names the base model and its tokenizer. Raises ConfigError; see `build`.
    """
    values = profile_values(profile, home)
    own = {key: value for key, value in (defaults or {}).items() if key not in EnvSection.model_fields}
    env = {**own, **values.get("env", {})}
    sections = {"env": env, **{name: values.get(name, {}) for name in ("openai", "tinker", "limits")}}
    for name, section in edits.items():
        sections[name] = {**sections[name], **section}
    if sections["tinker"].get("use_wandb") is False:
        sections["env"]["use_wandb"] = False  # the environment's own logging goes with the trainer's
    if sections["env"].get("wandb_name") is None:  # the Atropos API takes no environment without a name
        sections["env"]["wandb_name"] = f"{environment}-{datetime.now():%Y%m%d-%H%M%S}"
    if model:
        sections["env"]["tokenizer_name"] = sections["openai"]["model_name"] = model
    if PROFILES[profile].paid:
        base = sections["openai"].get("model_name", OpenAISection().model_name)
        sections["tinker"].setdefault("prices", price_of(base, home))
    return priced(build({"environment": environment, "profile": profile, **sections}))


def priced(config: RunConfig) -> RunConfig:
    """The configuration, if its budget of money can be kept. Raises ConfigError."""
    if config.limits.max_cost_usd is not None and PROFILES[config.profile].paid and config.tinker.prices is None:
        raise ConfigError(
            f"limits.max_cost_usd cannot be kept: no price of {config.openai.model_name} is known; add it to "
            "$LACHESIS_HOME/prices.yaml, or use limits.max_tokens"
        )
    return config


def plain(name: str) -> str:
    """An environment's name as part of the names of files and processes."""
    return re.sub("[^A-Za-z0-9_]+", "_", name)


def _weight(name: str, own: Mapping[str, Any]) -> float:
    weight = own.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= MOST_WEIGHT:
        raise ValueError(f"env.mixture.{name}.weight is {shorten(repr(weight), 40)}; allowed: above 0, at most {MOST_WEIGHT}")
    return float(weight)


def setting(name: str, default: float, *, least: float) -> float:
    """A number from the environment variable `name`. Raises ConfigError."""
    text = os.environ.get(name, "")
    try:
        value = float(text) if text.strip() else default
    except ValueError:
        value = math.nan
    if not value >= least:
        raise ConfigError(f"the environment variable {name} is {shorten(repr(text))}; allowed: a number, at least {least:g}")
    return value


def build(values: Mapping[str, Any], where: str = "") -> RunConfig:
    """A checked configuration. Raises FieldValueError that names every field which is wrong, its value and what is allowed."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise FieldValueError((f"{where}: " if where else "") + explain(error)) from error


def explain(error: ValidationError) -> str:
    """Pydantic's findings in one line: field, value, what is allowed."""
    lines = []
    for one in error.errors():
        place = ".".join(map(str, one["loc"]))
        message = one["msg"].removeprefix("Value error, ")
        if one["type"] == "missing":
            lines.append(f"{place} is missing")
            continue
        lines.append(f"{place} is {shorten(repr(one['input']))}: {message}" if place else message)
    return "; ".join(lines)
