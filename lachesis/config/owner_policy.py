"""Read `$LACHESIS_HOME/policy.yaml`, in which the owner says what agents may do.

    agents:
      environments: [countdown, gsm8k]    # and no others; names may have * and ?
      profiles: [embedded, tinker]
      models: ["Qwen/*", "tiny-*"]
      fields: [total_steps]               # locked fields that agents may set all the same
      locked_fields: [group_size]         # fields that agents may not set
      max_cost_usd_per_run: 5
      max_cost_usd_per_day: 20
      require_validation: true            # on paid profiles, before each run
      confirm_stop: true                  # an agent's stop is a preview until it is confirmed

What is left out is not restricted, apart from the locks of the profile. The owner is whoever uses
the command line, launch files or Prefect's pages; agents use the tools, by MCP, HTTP or Hermes.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from lachesis.base import paths
from lachesis.base.errors import ConfigError, PolicyError, shorten
from lachesis.config.profiles import ProfileName
from lachesis.config.run_fields import Section

FILE_NAME = "policy.yaml"
LOCK_REASON = f"the owner's {FILE_NAME} does not let agents set it"


class AgentPolicy(Section):
    """Hold the limits of what agents may start, set and spend; None allows everything."""

    environments: list[str] | None = None
    profiles: list[ProfileName] | None = None
    models: list[str] | None = None
    fields: list[str] = Field([])
    locked_fields: list[str] = Field([])
    max_cost_usd_per_run: float | None = Field(None, gt=0)
    max_cost_usd_per_day: float | None = Field(None, gt=0)
    require_validation: bool = True
    confirm_stop: bool = False

    def allows_field(self, section: str, name: str) -> bool:
        """Return whether agents may set a field that the profile locks for them."""
        return bool({name, f"{section}.{name}"} & set(self.fields))

    def locks_field(self, section: str, name: str) -> bool:
        """Return whether agents may not set a field that the profile leaves open."""
        return bool({name, f"{section}.{name}"} & set(self.locked_fields))

    @property
    def limits_cost(self) -> bool:
        """Return whether what agents spend is limited."""
        return self.max_cost_usd_per_run is not None or self.max_cost_usd_per_day is not None

    def require_environments(self, names: Iterable[str]) -> None:
        """Raise PolicyError for an environment that agents may not use."""
        for name in names:
            _require_match("environment", name, [name], self.environments)

    def require_profile(self, profile: str) -> None:
        """Raise PolicyError for a profile that agents may not use."""
        _require_match("profile", profile, [profile], self.profiles)

    def require_model(self, model: str) -> None:
        """Raise PolicyError for a model that agents may not use; a folder goes by its name too."""
        _require_match("model", model, [model, Path(model).name], self.models)


class PolicyFile(Section):
    """Hold the whole file."""

    agents: AgentPolicy = AgentPolicy()


def load_policy(home: Path | None = None) -> AgentPolicy:
    """Return the owner's policy for agents; without a file nothing is restricted.

    Raises:
        ConfigError: The file cannot be read or has another form.
    """
    file = (home or paths.home()) / FILE_NAME
    # Read at each call, so that what the owner changes counts at once.
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return AgentPolicy()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    try:
        return PolicyFile.model_validate(content or {}).agents
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"])) or "the file"
        raise ConfigError(
            f"{file}: {place}: {problem['msg']}; allowed under `agents`: "
            f"{', '.join(AgentPolicy.model_fields)}"
        ) from error


def _require_match(
    kind: str, name: str, spellings: list[str], patterns: Iterable[str] | None
) -> None:
    """Raise PolicyError unless one of the spellings matches a pattern; None allows every name."""
    if patterns is None:
        return
    allowed = list(patterns)
    if not any(fnmatchcase(text, pattern) for text in spellings for pattern in allowed):
        raise PolicyError(
            f"agents may not use the {kind} {shorten(repr(name), 120)}; allowed by the owner's "
            f"{FILE_NAME}: {', '.join(allowed) or 'none'}",
            allowed=allowed,
        )
