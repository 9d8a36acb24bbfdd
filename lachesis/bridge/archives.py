"""Pack and unpack the files in which an engine hands over adapters and states."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from lachesis.base.errors import ServerProtocolError
from lachesis.base.files import storage_errors
from lachesis.base.json_text import Json

# The name of a state in its tar file.
_STATE_MEMBER = "state"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")


def unpack_adapter(archive: bytes, folder: Path) -> None:
    """Write the adapter of a tar archive into a folder, as PEFT reads it.

    An engine may leave out which layers the adapter belongs to; PEFT would then load two of them
    only, so they are taken from the tensors.

    Raises:
        ServerProtocolError: The archive has no adapter.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            members = {Path(member.name).name: member for member in tar if member.isfile()}
            for name in ADAPTER_FILES:
                file = tar.extractfile(members[name])
                assert file is not None
                (folder / name).write_bytes(file.read())
    except (tarfile.TarError, KeyError) as error:
        raise ServerProtocolError(
            f"the engine's archive of {len(archive)} bytes holds no adapter of PEFT: {error}"
        ) from error
    _name_layers(folder)


def _name_layers(folder: Path) -> None:
    from safetensors import safe_open

    with safe_open(folder / ADAPTER_FILES[0], framework="numpy") as tensors:
        layers = find_layers(tensors.keys())
    file = folder / ADAPTER_FILES[1]
    config: Json = json.loads(file.read_text())
    config["target_modules"] = layers
    config.setdefault("task_type", "CAUSAL_LM")
    file.write_text(json.dumps(config, indent=2))


def find_layers(tensor_names: Iterable[str]) -> list[str]:
    """Return the names of the kinds of layers that have an adapter, such as `q_proj`."""
    paths = [name.split(".lora_A.")[0] for name in tensor_names if ".lora_A." in name]
    return sorted({path.rpartition(".")[2] for path in paths})


def pack_state(source: Path, target: Path) -> None:
    """Write what an engine has saved, a file or a folder, into one tar file."""
    with tarfile.open(target, "w") as tar:
        tar.add(source, arcname=_STATE_MEMBER)


def unpack_state(source: Path, target: Path) -> None:
    """Put a packed state in the place of one that an engine has saved.

    Raises:
        StorageError: The disk refused a write.
    """
    with storage_errors(target), tarfile.open(source) as tar:
        staging = Path(tempfile.mkdtemp(dir=target.parent))
        tar.extractall(staging, filter="data")
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(staging / _STATE_MEMBER, target)
        staging.rmdir()
