"""Shorten the imports of transformers and PEFT, for which engines, trainers and environments wait.

At its import, transformers 5 reads every file of all its models to learn which names they define:
twice, because it names their folder once by its path and once by that of a file in it, and line by
line, although only the end of a file matters. What is learned is the same with these changes; a
test compares it. PEFT imports bitsandbytes where it is installed, which loads PyTorch's compiler.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

SCANNER = "transformers.utils.import_utils"


def speed_up_transformers_import() -> None:
    """Change the scan of the models at the first import of transformers, if there was none yet."""
    is_prepared = any(isinstance(finder, _ScannerFinder) for finder in sys.meta_path)
    if SCANNER not in sys.modules and not is_prepared:
        sys.meta_path.insert(0, _ScannerFinder())


def leave_out_bitsandbytes() -> None:
    """Import PEFT as if bitsandbytes were not installed, in a program that quantises no weights.

    This saves two seconds of a processor. It holds until the process ends, because PEFT remembers.
    """
    # `import` and `find_spec` both take None for a module that does not exist.
    sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]


class _ScannerFinder(MetaPathFinder):
    """Find the module that scans the models, and change it once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != SCANNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            _change_scan(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def _change_scan(scanner: Any) -> None:
    """Do nothing where another version of transformers does not scan in this way."""
    scan = getattr(scanner, "create_import_structure_from_path", None)
    read_names = getattr(scanner, "fetch__all__", None)
    if scan is not None and read_names is not None:
        scanner.create_import_structure_from_path = _scan_each_folder_once(scan)
        scanner.fetch__all__ = _read_from_last_list(read_names)


def _scan_each_folder_once(scan: Callable[[str], Any]) -> Callable[[str], Any]:
    """`scan` keeps its results by their paths; give it one path for each folder."""

    @functools.wraps(scan)
    def scan_folder(path: str) -> Any:
        return scan(os.path.dirname(path) if os.path.isfile(path) else str(path))

    return scan_folder


def _read_from_last_list(read_names: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """`read_names` reads the last `__all__` of a text; leave out the lines before it."""

    @functools.wraps(read_names)
    def read(text: str) -> list[str]:
        return read_names(text[text.rfind("\n__all__") + 1 :])

    return read
