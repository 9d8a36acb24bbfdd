"""Find the files of a model: in a folder, in the cache of Hugging Face, or on its Hub.

Nothing here loads a model. A launch is checked before it is submitted, so that a misspelt name
costs a second instead of a minute of retries in the log of an engine.
"""

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path

import httpx

from lachesis.base.errors import ModelNotFoundError, shorten
from lachesis.base.json_text import Json

HUB_TIMEOUT_S = 4.0
_MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_VOCABULARY_PATTERNS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken")
# Some tokenizers, such as one of bytes, have no vocabulary file.
_TOKENIZER_PATTERNS = (*_VOCABULARY_PATTERNS, "tokenizer_config.json")


def require_model(name: str, *, needs_weights: bool = True) -> None:
    """Raise ModelNotFoundError unless the model can be loaded here or downloaded.

    Args:
        name: A folder, or a name on the Hub.
        needs_weights: Whether the weights are needed too. A run that trains elsewhere needs the
            tokenizer only.
    """
    folder = Path(name)
    if folder.is_absolute():
        if missing := _find_missing_file(folder, needs_weights=needs_weights):
            raise ModelNotFoundError(f"the model in {folder} is incomplete: {missing} is missing")
    elif not is_cached(name, needs_weights=needs_weights):
        _require_on_hub(name)


def is_cached(name: str, *, needs_weights: bool = True) -> bool:
    """Return whether the cache of Hugging Face holds all files of this model.

    The cache fills file by file, a tokenizer's settings before its vocabulary, so settings alone
    may be what is left of an interrupted download.
    """
    snapshot = find_cached_snapshot(name)
    if snapshot is None:
        return False
    return _find_missing_file(snapshot, needs_weights=needs_weights) is None and _has_file(
        snapshot, _VOCABULARY_PATTERNS
    )


def find_cached_snapshot(name: str) -> Path | None:
    """Return a model's folder in Hugging Face's cache, named after its revision, or None."""
    if not _MODEL_NAME.fullmatch(name):
        return None
    model_dir = _get_hub_cache_dir() / f"models--{name.replace('/', '--')}"
    try:
        return model_dir / "snapshots" / (model_dir / "refs" / "main").read_text().strip()
    except OSError:
        return None


def find_model_folder(name: str) -> Path | None:
    """Return the folder with the files of a model that is on this machine, or None."""
    folder = Path(name)
    if folder.is_absolute():
        return folder
    return find_cached_snapshot(name)


def fetch_model_settings(name: str) -> None:
    """Download a model's configuration and chat template from the Hub, if it is there.

    Weights and vocabulary are not downloaded. Without a network nothing happens.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    for file in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        # Not every model has all of them.
        with contextlib.suppress(HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):
            hf_hub_download(name, file, etag_timeout=HUB_TIMEOUT_S)


def read_model_settings(name: str) -> Json:
    """Return a model's `config.json`, its text part first; empty if it is not here."""
    folder = find_model_folder(name)
    if folder is not None:
        with contextlib.suppress(OSError, ValueError):
            content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            if isinstance(content, dict):
                return {**content, **(content.get("text_config") or {})}
    return {}


def read_chat_template(name: str) -> str | None:
    """Return the chat template of a model, or None if it has none or is not on this machine."""
    folder = find_model_folder(name)
    if folder is None:
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = settings.get("chat_template")
        if isinstance(template, list):  # Some models have several, by name.
            return json.dumps(template)
        if isinstance(template, str):
            return template
    return None


def compute_template_digest(name: str) -> str | None:
    """Return digits that change with a model's chat template; None where it has none here."""
    template = read_chat_template(name)
    if template is None:
        return None
    return hashlib.sha256(template.encode()).hexdigest()[:16]


def _find_missing_file(folder: Path, *, needs_weights: bool) -> str | None:
    """Return the first file that a model's folder lacks, or None for a complete folder."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if not _has_file(folder, _TOKENIZER_PATTERNS):
        return "a tokenizer (tokenizer.json)"
    if not needs_weights:
        return None
    indices = list(folder.glob("*.index.json"))
    for index in indices:
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return f"a readable {index.name}"
        if missing_shards := sorted(shard for shard in shards if not (folder / shard).is_file()):
            return str(missing_shards[0])
    files = [file.name for pattern in _WEIGHT_PATTERNS for file in folder.glob(pattern)]
    if files and not indices and all("-of-" in name for name in files):
        return "the list of its files of weights (model.safetensors.index.json)"
    if files:
        return None
    return "a file of weights (model.safetensors)"


def _has_file(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(True for pattern in patterns for _ in folder.glob(pattern))


def _get_hub_cache_dir() -> Path:
    """Return the folder in which the libraries of Hugging Face keep their downloads."""
    configured = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if configured:
        return Path(configured).expanduser()
    return _get_hf_home() / "hub"


def _get_hf_home() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{caches}/huggingface").expanduser()


def _require_on_hub(name: str) -> None:
    """Raise ModelNotFoundError unless the Hub has the model and gives this user access to it."""
    short_name = shorten(name)
    if not _MODEL_NAME.fullmatch(name):
        raise ModelNotFoundError(
            f"{short_name} is neither a folder nor a name on the Hugging Face Hub (OWNER/NAME)"
        )
    hub = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise _make_unreachable_error(name, "HF_HUB_OFFLINE is set, so the Hub was not contacted")
    token = _read_hub_token()
    try:
        response = httpx.head(
            f"{hub}/{name}/resolve/main/config.json",
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=HUB_TIMEOUT_S,
        )
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise _make_unreachable_error(
            name, f"the Hub ({hub}) cannot be reached ({error or type(error).__name__})"
        ) from error
    if response.status_code in (401, 403):
        raise ModelNotFoundError(
            f"the Hub ({hub}) has no model {short_name}, or you have no access to it (HTTP "
            f"{response.status_code}): look at {hub}/{name}, accept its terms if it has any, and "
            "set HF_TOKEN for this command and for `lachesis serve`"
        )
    if response.status_code in (404, 410):
        raise ModelNotFoundError(
            f"the Hub ({hub}) has no model {short_name}, or the model has no config.json; look up "
            "its name there, or name a folder with --model FOLDER"
        )


def _make_unreachable_error(name: str, reason: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"the model {name} is not on this machine: it is not a folder, it is not in "
        f"{_get_hub_cache_dir()}, and {reason}; on a machine with a network "
        f"`hf download {name} --local-dir FOLDER` downloads it, then --model FOLDER names it"
    )


def _read_hub_token() -> str:
    """Return the Hub's token from the environment or the file of `hf auth login`."""
    configured = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if configured:
        return configured
    try:
        return (
            Path(os.environ.get("HF_TOKEN_PATH") or _get_hf_home() / "token")
            .expanduser()
            .read_text()
            .strip()
        )
    except (OSError, UnicodeDecodeError):
        return ""
