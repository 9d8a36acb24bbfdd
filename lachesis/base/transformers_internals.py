"""Shorten the import of PEFT, for which engines wait."""

from __future__ import annotations

import sys


def leave_out_bitsandbytes() -> None:
    """Import PEFT as if bitsandbytes were not installed, in a program that quantises no weights.

    Where it is installed, PEFT imports it, which loads PyTorch's compiler and takes two seconds of
    a processor. The change holds until the process ends, because PEFT remembers.
    """
    # `import` and `find_spec` both take None for a module that does not exist.
    sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]
