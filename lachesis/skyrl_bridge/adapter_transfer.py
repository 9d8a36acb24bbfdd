"""Save and load adapters of the engine behind the bridge, as folders and as tar files."""

import contextlib
import io
import itertools
import json
import os
import shutil
import tarfile
import tempfile
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lachesis.base.errors import EngineRequestError, LachesisError, ServerProtocolError
from lachesis.base.files import storage_errors
from lachesis.base.json_text import Json
from lachesis.skyrl_bridge.client import UpstreamClient
from lachesis.skyrl_bridge.sample_forwarding import SamplingWeights
from lachesis.tinker_server.checkpoint_store import CheckpointPath, CheckpointStore
from lachesis.tinker_server.model_description import BridgedModel, LoraSpec

# The engine's own file with weights and optimizer, and the path under which the engine has them.
STATE_FILE, UPSTREAM_KEY = "state.tar", "upstream"
_SPEC_FIELDS = ("rank", "seed", "train_attn", "train_mlp", "train_unembed")


class AdapterStates:
    """Move the states of adapters between the engine and the run's folder."""

    def __init__(
        self,
        upstream: UpstreamClient,
        model: BridgedModel,
        store_root: Path,
        upstream_folder: Path | None,
    ) -> None:
        """Open the checkpoints.

        Args:
            upstream: The engine.
            model: The base model.
            store_root: The folder of the checkpoints.
            upstream_folder: The folder in which the engine saves, if it is on this machine.
        """
        self.upstream, self.model = upstream, model
        self.store = CheckpointStore(store_root)
        self._upstream_folder = upstream_folder
        self._prefix, self._numbers = uuid.uuid4().hex[:8], itertools.count()
        # The adapter under whose name saved states are given back to the engine, by rank.
        self._carriers: dict[int, str] = {}

    # --- saving

    def save(
        self, upstream_id: str, path: CheckpointPath, record: dict[str, Any], *, overwrite: bool
    ) -> int:
        """Write a checkpoint of an adapter and return its size in bytes.

        Raises:
            EngineRequestError: It exists and `overwrite` is false, or its name is not allowed.
            StorageError: The disk refused a write.
        """
        kept_path = ""
        if path.kind != "external_weights":
            kept_path = self.upstream.save_state(upstream_id, self._make_name())
        archive = b""
        if path.kind != "weights":
            archive = self._fetch_archive(upstream_id)

        def write_files(folder: Path) -> None:
            if archive:
                unpack_adapter(archive, folder)
            if kept_path and self._upstream_folder:
                pack_state(self._find_state(kept_path), folder / STATE_FILE)
            elif kept_path:
                (folder / "upstream.json").write_text(json.dumps({UPSTREAM_KEY: kept_path}))

        size = self.store.write(
            path, write_files, {**record, UPSTREAM_KEY: kept_path}, overwrite=overwrite
        )
        if kept_path and self._upstream_folder:
            self._delete(kept_path)
        return size

    def _fetch_archive(self, upstream_id: str) -> bytes:
        saved = self.upstream.save_for_sampler(upstream_id, self._make_name())
        archive = self.upstream.download_archive(saved)
        self._delete(saved)
        return archive

    def _delete(self, upstream_path: str) -> None:
        # An engine that cannot delete keeps its files until it ends.
        with contextlib.suppress(LachesisError):
            self.upstream.delete_checkpoint(upstream_path)

    def _find_state(self, upstream_path: str) -> Path:
        assert self._upstream_folder is not None
        model_id, _, name = upstream_path.removeprefix("tinker://").split("/")
        return self._upstream_folder / model_id / f"{name}.tar.gz"

    def _make_name(self) -> str:
        """Return a name that the engine has not had."""
        return f"{self._prefix}-{next(self._numbers)}"

    # --- loading

    def load(self, path: CheckpointPath, *, with_optimizer: bool) -> tuple[LoraSpec, str]:
        """Create an adapter with the weights of a checkpoint; return its form and its name.

        Raises:
            EngineRequestError: There is no such checkpoint, or it cannot be trained further.
        """
        record = self.store.read_record(path)
        spec = LoraSpec(**{name: record["lora"][name] for name in _SPEC_FIELDS})
        if with_optimizer and path.kind != "weights":
            raise EngineRequestError(
                f"{path} has no optimizer state; use a weights/ path, or load without the optimizer"
            )
        upstream_path = self._offer(path, record, spec)
        upstream_id = self.upstream.create_model(self.model.name, spec.rank, seed=0)
        self.upstream.load_state(upstream_id, upstream_path, with_optimizer=with_optimizer)
        return spec, upstream_id

    def _offer(self, path: CheckpointPath, record: dict[str, Any], spec: LoraSpec) -> str:
        """Make sure that the engine has a state, and return its path there."""
        file = self.store.find_folder(path) / STATE_FILE
        if not file.is_file():
            if record.get(UPSTREAM_KEY):
                return str(record[UPSTREAM_KEY])
            raise EngineRequestError(f"{path} holds no state that could be loaded")
        if self._upstream_folder is None:
            raise EngineRequestError(
                f"{path} was saved by an engine that was started for its run, and this engine at "
                f"{self.upstream.url} cannot read its file; start the run with the same backend"
            )
        carrier = self._carriers.get(spec.rank)
        if carrier is None:
            carrier = self.upstream.create_model(self.model.name, spec.rank, seed=0)
            self._carriers[spec.rank] = carrier
        upstream_path = self.upstream.save_state(carrier, self._make_name())
        unpack_state(file, self._find_state(upstream_path))
        return upstream_path

    # --- sampling

    def copy_for_sampling(self, upstream_id: str, spec: LoraSpec) -> SamplingWeights:
        """Copy the weights of an adapter to a new one that is only sampled."""
        upstream_path = self.upstream.save_state(upstream_id, self._make_name())
        try:
            return self._sample_from(upstream_path, spec)
        finally:
            self._delete(upstream_path)

    def load_for_sampling(self, path: CheckpointPath) -> SamplingWeights:
        """Load a checkpoint for sampling."""
        record = self.store.read_record(path)
        spec = LoraSpec(**{name: record["lora"][name] for name in _SPEC_FIELDS})
        return self._sample_from(self._offer(path, record, spec), spec)

    def _sample_from(self, upstream_path: str, spec: LoraSpec) -> SamplingWeights:
        copy = self.upstream.create_model(self.model.name, spec.rank, seed=0)
        self.upstream.load_state(copy, upstream_path, with_optimizer=False)
        saved = self.upstream.save_for_sampler(copy, self._make_name())
        return SamplingWeights(self.upstream.create_sampler(path=saved), copy, saved)

    def release(self, weights: SamplingWeights) -> None:
        """Free what the engine holds for sampling from these weights."""
        if weights.upstream_model:
            self.upstream.unload_model(weights.upstream_model)
            self._delete(weights.upstream_path)


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
    """Write the names of the adapted layers into the adapter's configuration."""
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
    """Write a saved file or folder of an engine into one tar file."""
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
