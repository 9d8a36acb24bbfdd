"""Import a large module only when it is used.

Every environment's process imports Atropos, which imports transformers and W&B, which import
PyTorch. Most environments use neither PyTorch nor W&B themselves, and importing them takes as long
as everything else together. Users wait for it at each validation, test and start.
"""

import functools
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stand in for a module until one of its attributes is used, then become the module.

    The object stays the same, so names that were bound by `import torch` remain valid.
    `importlib.util.LazyLoader` cannot be used here: before Python 3.12 a second `import` of the
    same name already loads the module.
    """

    def __getattr__(self, name: str) -> Any:
        lock: threading.RLock = self.__dict__["_lachesis_loading"]
        with lock:  # Other threads wait until the module is complete.
            if type(self) is LazyModule and not self.__dict__["_lachesis_started"]:
                self._load()
        return ModuleType.__getattribute__(self, name)

    def _load(self) -> None:
        """Execute the module for real; after a failure the next use tries again."""
        self.__dict__["_lachesis_started"] = True
        spec = self.__spec__
        assert spec is not None and spec.loader is not None  # noqa: PT018
        if spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations
        try:
            spec.loader.exec_module(self)
        except BaseException:
            sys.modules.pop(spec.name, None)  # As after a failed import, the next one tries again.
            self.__dict__["_lachesis_started"] = False
            raise
        self.__class__ = ModuleType  # type: ignore[assignment]


def load_when_used(*names: str) -> None:
    """Load each module at its first use, unless it is loaded already or not installed."""
    for name in names:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            continue
        module = importlib.util.module_from_spec(spec)
        # Importing a submodule looks up `__path__` first, which then loads the package.
        module.__dict__.pop("__path__", None)
        module.__dict__.update(_lachesis_loading=threading.RLock(), _lachesis_started=False)
        module.__class__ = LazyModule
        sys.modules[name] = module


def load_tokenizers_without_torch() -> None:
    """Keep `AutoTokenizer` from loading PyTorch.

    It reads the model's configuration only to discard it, and that looks up its number type in
    PyTorch.
    """
    from transformers import AutoTokenizer, configuration_utils

    load = AutoTokenizer.from_pretrained

    @functools.wraps(load)
    def from_pretrained(*values: object, **options: object) -> Any:
        """Load a tokenizer as if PyTorch were not installed, unless it is loaded already."""
        if type(sys.modules.get("torch")) is not LazyModule:
            return load(*values, **options)
        is_available = configuration_utils.is_torch_available
        configuration_utils.is_torch_available = lambda: False
        try:
            return load(*values, **options)
        finally:
            configuration_utils.is_torch_available = is_available

    AutoTokenizer.from_pretrained = staticmethod(from_pretrained)
