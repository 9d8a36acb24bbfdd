"""Shorten the imports of PyTorch, transformers and PEFT, for which programs wait."""

import contextlib
import gc
import sys
from collections.abc import Iterator


def leave_out_bitsandbytes() -> None:
    """Import PEFT as if bitsandbytes were not installed, in a program that quantises no weights.

    Where it is installed, PEFT imports it, which loads PyTorch's compiler and takes two seconds of
    a processor. The change holds until the process ends, because PEFT remembers.
    """
    # `import` and `find_spec` both take None for a module that does not exist.
    sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause garbage collection in the block, and exempt its objects from later collections."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
