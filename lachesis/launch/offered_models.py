"""List the models that a profile can train: what its server offers now, asked of the server.

The server says which models it offers and how long their context is. Prices are those of the price
table, as no server tells them. What thinking is, and the recommended settings, are read in the
model's own files: those on this machine, or for one model those on the Hub.
"""

from pathlib import Path

from lachesis.base import paths
from lachesis.base.api_keys import read_key
from lachesis.base.errors import ModelNotFoundError
from lachesis.base.formatting import suggest
from lachesis.base.json_text import Json, ResponseModel
from lachesis.base.tinker_client import request_tinker
from lachesis.config.prices import Prices, find_prices
from lachesis.config.profiles import PROFILES, check_profile, load_profile_values
from lachesis.launch import choose_model
from lachesis.models.chat_template import ThinkingSwitch, find_thinking_switch
from lachesis.models.find_model import fetch_model_settings, read_chat_template, read_model_settings
from lachesis.models.recommended_settings import Recommendation, recommend_settings

KEY_NAME = "TINKER_API_KEY"
MAX_NAMES = 12


class OfferedModel(ResponseModel):
    """Describe one model that can be trained; unknown properties are null."""

    name: str
    max_context_length: int | None
    """Tokens of a prompt and an answer together."""
    trainable: bool
    price: Prices | None
    """US dollars per million tokens and the day they were looked up; null if free or not known."""
    renderer: str | None
    """How conversations become tokens: `chat template`, or `plain text` without one."""
    thinking: str | None
    """Whether it thinks before it answers, and how that is switched."""
    can_switch_thinking_off: bool | None
    recommended: Recommendation


class ModelList(ResponseModel):
    """List the models of one profile."""

    profile: str
    default_model: str
    """The model that is trained if none is named."""
    models: list[OfferedModel]
    count: int
    tips: list[str]


def list_models(profile: str, home: Path) -> ModelList:
    """Return the models that a profile can train, and where the list comes from.

    Raises:
        ConfigError: There is no such profile.
        MissingKeyError: A key is missing or refused.
        ServerDownError: The server does not answer.
    """
    values = load_profile_values(profile, home)
    if not PROFILES[profile].is_paid:
        default = str(choose_model.get_default_tiny_model_path(home))
        folders = [default, *(str(folder) for folder in _list_taught_models(home))]
        models = [describe_model(folder, home) for folder in folders]
        tips = [
            "any causal language model of Hugging Face can be trained here: its name or its folder",
            "`lachesis model build --for ENVIRONMENT` makes a tiny one that learns on a laptop",
        ]
    else:
        default = values.get("openai", {}).get("model_name", "Qwen/Qwen3-8B")
        models = [
            describe_model(str(entry["model_name"]), home, entry)
            for entry in ask_offered_models(profile)
        ]
        tips = [
            "prices are those of the price table on its day; the provider's bill counts",
            "`lachesis model show NAME` reads a model's files on the Hub, for the rest",
        ]
    return ModelList(
        profile=profile, default_model=default, models=models, count=len(models), tips=tips
    )


def ask_offered_models(profile: str) -> list[Json]:
    """Return the entries of the models that the profile's server offers.

    Raises:
        MissingKeyError: A key is missing or refused.
        ServerDownError: The server does not answer.
    """
    check_profile(profile)
    content = request_tinker("GET", "get_server_capabilities", read_key(KEY_NAME))
    entries = content.get("supported_models") or []
    return [entry for entry in entries if entry.get("model_name")]


def require_offered_model(profile: str, model: str) -> None:
    """Check that the profile's server offers a model for training.

    It is not asked where this process has no key, because the launcher may have one.

    Raises:
        ModelNotFoundError: It does not.
        MissingKeyError: The key is refused.
        ServerDownError: The server does not answer.
    """
    # A shell without the key may start a run of a launcher that has it; the trainer meets the
    # server's refusal then.
    if not PROFILES[profile].is_paid or not read_key(KEY_NAME):
        return
    entries = ask_offered_models(profile)
    names = [str(entry["model_name"]) for entry in entries if entry.get("trainable") is not False]
    if model not in names:
        raise ModelNotFoundError(
            f"the server of profile {profile} does not offer {model} for training"
            f"{suggest(model, names)}; it offers {', '.join(names[:MAX_NAMES]) or 'no model'}"
            f"{' and others' if len(names) > MAX_NAMES else ''} (`lachesis model list --profile "
            f"{profile}`)",
            available=names,
        )


def describe_model(name: str, home: Path, entry: Json | None = None) -> OfferedModel:
    """Return the properties of a model, from its files on this machine and its server's entry."""
    settings, template = read_model_settings(name), read_chat_template(name)
    has_files = bool(settings) or template is not None
    context = (entry or {}).get("max_context_length") or settings.get("max_position_embeddings")
    switch = _find_switch(template, has_files=has_files)
    return OfferedModel(
        name=name,
        max_context_length=context,
        trainable=(entry or {}).get("trainable") is not False,
        price=find_prices(name, home) if entry is not None else None,
        renderer=_describe_renderer(template, has_files=has_files),
        thinking=switch and switch.describe(),
        can_switch_thinking_off=switch and switch.can_be_off,
        recommended=_recommend(name, settings),
    )


def fetch_and_describe(name: str, profile: str, home: Path) -> OfferedModel:
    """Return one model of a profile, after its small files were fetched from the Hub if needed.

    Raises:
        ModelNotFoundError: The profile's server does not offer it.
    """
    entry = None
    if PROFILES[profile].is_paid:
        require_offered_model(profile, name)
        entries = ask_offered_models(profile)
        entry = next(entry for entry in entries if entry["model_name"] == name)
    else:
        name = choose_model.resolve_model(name, home)
    if not read_model_settings(name):
        fetch_model_settings(name)
    return describe_model(name, home, entry)


def _recommend(name: str, settings: Json) -> Recommendation:
    # The rule between widths was measured on models a thousand times as large.
    if Path(name).name.startswith("tiny-"):
        rate = load_profile_values("embedded")["tinker"]["learning_rate"]
        source = "the value of profile embedded, which is known to train tiny models"
        return Recommendation(learning_rate=rate, learning_rate_source=source)
    family_name = f"{name} {settings.get('model_type', '')}"
    return recommend_settings(family_name, _read_width(settings))


def _list_taught_models(home: Path) -> list[Path]:
    folders = paths.models_dir(home).glob("tiny-*-*")
    return sorted(folder for folder in folders if (folder / "config.json").is_file())


def _read_width(settings: Json) -> int | None:
    width = settings.get("hidden_size")
    return width if isinstance(width, int) and width > 0 else None


def _find_switch(template: str | None, *, has_files: bool) -> ThinkingSwitch | None:
    if template is not None:
        return find_thinking_switch(template)
    # A base model without a template is given plain text, and does not think by itself.
    if has_files:
        return ThinkingSwitch(False)
    return None


def _describe_renderer(template: str | None, *, has_files: bool) -> str | None:
    if template is not None:
        return "chat template"
    if has_files:
        return "plain text"
    return None
