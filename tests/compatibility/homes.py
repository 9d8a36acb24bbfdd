"""Unpack a home that an earlier version made; see README.md beside this file."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

BEFORE_PACKAGES = Path(__file__).with_name("home_before_packages.tar.gz")


def unpack_home(archive: Path, home: Path) -> dict[str, dict[str, Any]]:
    """Add an archived home's runs and models to `home` and return the record of each run by its
    status.
    """
    with tarfile.open(archive) as packed:
        packed.extractall(home, filter="fully_trusted")  # the home of a test may link to its models
        names = packed.getnames()
    records = {}
    for path in (home / name for name in names):
        if path.is_file() and path.suffix not in {".safetensors", ".py"}:
            path.write_text(path.read_text().replace("@HOME@", str(home)))
        if path.name == "run.json" and path.parent.parent.name == "runs":
            record = json.loads(path.read_text())
            records[record["status"]] = record
    for manifest in (home / name for name in names if "/checkpoints/step-" in name):
        _describe_files_again(manifest, manifest.parents[1])
    return records


def _describe_files_again(manifest: Path, folder: Path) -> None:
    """Write sizes and checksums into a checkpoint's manifest: an adapter's configuration holds the
    home's path.
    """
    checkpoint = json.loads(manifest.read_text())
    for name in checkpoint["files"]:
        content = (folder / name).read_bytes()
        checkpoint["files"][name] = {
            "sha256": hashlib.sha256(content).hexdigest(),
            "size": len(content),
        }
    manifest.write_text(json.dumps(checkpoint))
