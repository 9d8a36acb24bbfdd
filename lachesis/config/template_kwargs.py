"""Build the arguments of a model's chat template from the configuration of a run."""

from __future__ import annotations

from lachesis.base.errors import ConfigError
from lachesis.base.json_text import Json
from lachesis.config.run_config import RunConfig
from lachesis.models.chat_template import build_template_kwargs
from lachesis.models.find_model import read_chat_template


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
