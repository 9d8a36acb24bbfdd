"""Push exported weights to a repository of the Hugging Face Hub.

What leaves this machine are the weights, a card, and a note without paths of this machine. All
files arrive in one commit, so that nobody sees half of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lachesis.base.errors import ArgumentsError, MissingKeyError, ServerDownError, shorten
from lachesis.base.json_text import Json
from lachesis.checkpoints.export_weights import NOTE_FILE
from lachesis.weight_agreement.at_export import MERGED_FOLDER

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# What others may know of the note that lies beside exported weights.
PUBLIC_NOTES = (
    "run_id", "environment", "step", "reward", "held_out", "exported_at", "verified",
    "verified_by", "base_revision", "parity", "parity_merged",
)  # fmt: skip
CARD_FILE = "README.md"
HOW_TO_SIGN_IN = "set HF_TOKEN to a token that may write, or sign in with `hf auth login`"


def check_base_model(base_model: str, *, merged: bool) -> None:
    """Refuse to push an adapter that nobody else could load.

    Raises:
        ArgumentsError: Its base model is a folder on this machine.
    """
    if Path(base_model).is_dir() and not merged:
        raise ArgumentsError(
            f"the base model of this run is a folder on this machine ({base_model}), so nobody "
            "else could load its adapter; add --merged to push the whole model"
        )


def find_repository(name: str) -> str:
    """Return OWNER/NAME of a repository, after the Hub has accepted this user's token.

    Args:
        name: NAME, or OWNER/NAME for that of an organization.

    Raises:
        ArgumentsError: A repository cannot have this name.
        MissingKeyError: There is no token, or the Hub refuses it.
        ServerDownError: The Hub does not answer.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ArgumentsError(
            f"--push-to-hub {shorten(repr(name))} is not the name of a repository: {error}"
        ) from error
    with _explain_errors(name) as api:
        user = api.whoami()["name"]
    if "/" in name:
        return name
    return f"{user}/{name}"


def push_weights(
    repository: str, folder: Path, note: Json, card: str, *, merged: bool, public: bool
) -> Json:
    """Push exported weights in one commit, into a new repository or over an older commit.

    Args:
        repository: OWNER/NAME; it is made if it does not exist.
        folder: Where the weights were exported.
        note: The note of the export.
        card: The text of the repository's first page.
        merged: Push the merged model in place of the adapter.
        public: Let everybody see a repository that is made now.

    Returns:
        The `repository`, its `url` and `commit`, and whether it is `private`.

    Raises:
        MissingKeyError: The user may not write there.
        ServerDownError: The Hub does not answer, or refuses the files.
    """
    from huggingface_hub import CommitOperationAdd

    if merged:
        folder = folder / MERGED_FOLDER
    files: dict[str, bytes | str] = {
        CARD_FILE: card.encode(),
        NOTE_FILE: _make_public_note(note),
        **_list_files(folder, str(note["base_model"]), repository),
    }
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    message = f"Step {note['step']} of run {note['run_id']}"
    with _explain_errors(repository, f"the weights are in {folder}; the same command pushes them"):
        api = _make_api()
        url = api.create_repo(repository, private=not public, exist_ok=True)
        commit = api.create_commit(repository, operations, commit_message=message)
        is_private = bool(api.model_info(repository).private)
    return {"repository": repository, "url": str(url), "commit": commit.oid, "private": is_private}


def _make_public_note(note: Json) -> bytes:
    public_note = {key: note[key] for key in PUBLIC_NOTES if key in note}
    return json.dumps(public_note, indent=2).encode()


def _list_files(folder: Path, base_model: str, repository: str) -> dict[str, bytes | str]:
    """Return the paths of a model's files, and of JSON files their content without local paths."""
    files: dict[str, bytes | str] = {}
    for file in sorted(folder.iterdir()):
        if file.name in (NOTE_FILE, CARD_FILE) or not file.is_file():
            continue
        if file.name == "adapter_config.json":
            config = json.loads(file.read_text())
            # The engine may have loaded the base model from a folder of the cache.
            config["base_model_name_or_path"] = base_model
            files[file.name] = json.dumps(config, indent=2).encode()
        elif file.suffix == ".json" and Path(base_model).is_dir():
            files[file.name] = file.read_text().replace(base_model, repository).encode()
        else:
            files[file.name] = str(file)
    return files


def _make_api() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(library_name="lachesis")


@contextlib.contextmanager
def _explain_errors(repository: str, next_step: str = "nothing was pushed") -> Iterator[HfApi]:
    """Translate what the Hub's library raises."""
    from huggingface_hub import errors

    try:
        yield _make_api()
    except errors.LocalTokenNotFoundError as error:
        raise MissingKeyError(f"there is no token for the Hub: {HOW_TO_SIGN_IN}") from error
    except errors.OfflineModeIsEnabled as error:
        raise ServerDownError(
            f"HF_HUB_OFFLINE forbids requests to the Hub; unset it to push. {next_step}"
        ) from error
    except errors.HfHubHTTPError as error:
        raise _translate_refusal(error, repository, next_step) from error
    except Exception as error:  # The library's HTTP client differs from version to version.
        reason = shorten(str(error) or type(error).__name__)
        raise ServerDownError(
            f"{repository} could not be pushed to the Hub: {reason}; {next_step}"
        ) from error


def _translate_refusal(
    error: Exception, repository: str, next_step: str
) -> MissingKeyError | ServerDownError:
    """Return the error for a refusal of the Hub: one of its token, or any other."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    reason = shorten(getattr(error, "server_message", None) or str(error))
    if status in (401, 403):
        return MissingKeyError(
            f"the Hub refuses {repository} (HTTP {status}: {reason}); {HOW_TO_SIGN_IN}, and check "
            f"that you may write there. {next_step}"
        )
    return ServerDownError(f"the Hub refuses {repository} (HTTP {status}: {reason}); {next_step}")
