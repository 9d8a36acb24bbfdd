"""Store adapters and Adam's state as checkpoints.

The folder of a checkpoint holds a PEFT adapter (`adapter_model.safetensors`, `adapter_config.json`)
and, for training checkpoints, Adam's state (`optimizer.safetensors`).
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lachesis.tinker_server.checkpoint_store import CheckpointPath, CheckpointStore


class WeightsStore(CheckpointStore):
    """Manage the checkpoints in one folder."""

    def save(
        self,
        path: CheckpointPath,
        *,
        tensors: dict[str, torch.Tensor],
        adapter_config: dict[str, Any],
        checkpoint_record: dict[str, Any],
        optimizer: dict[str, torch.Tensor] | None = None,
        overwrite: bool = False,
    ) -> int:
        """Write a checkpoint and return its size in bytes.

        Raises:
            EngineRequestError: It exists and `overwrite` is false, or its name is not allowed.
            StorageError: The disk refused a write.
        """

        def write_files(folder: Path) -> None:
            try:
                save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
                if optimizer is not None:
                    save_file(optimizer, folder / "optimizer.safetensors")
            except SafetensorError as error:
                raise OSError(str(error)) from error
            (folder / "adapter_config.json").write_text(json.dumps(adapter_config, indent=2))

        return self.write(path, write_files, checkpoint_record, overwrite=overwrite)

    def load(
        self, path: CheckpointPath
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor] | None, dict[str, Any]]:
        """Return the adapter's tensors, Adam's tensors if saved, and the checkpoint's record."""
        folder = self.find_folder(path)
        checkpoint_record = self.read_record(path)
        optimizer = folder / "optimizer.safetensors"
        return (
            load_file(folder / "adapter_model.safetensors"),
            load_file(optimizer) if optimizer.exists() else None,
            checkpoint_record,
        )
