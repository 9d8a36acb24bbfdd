"""`lachesis env new`: a file that works as it is, for its author to change."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from lachesis.base.errors import ConfigError, StorageError
from lachesis.base.files import storage_errors

NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,63}")
TEMPLATE = Path(__file__).parents[1] / "environment" / "template.txt"


def write_scaffold(name: str, folder: Path) -> Path:
    """Write NAME.py into the folder, which is made if it is not there; its path.

    Raises ConfigError for a name that Python cannot import, or StorageError when the file is there
    or cannot be written.
    """
    if not NAME_PATTERN.fullmatch(name) or keyword.iskeyword(name):
        allowed = "small letters, digits and _, a letter first, and no word of Python's"
        raise ConfigError(f"{name[:80]!r} cannot be an environment's name; allowed: {allowed}")
    file = folder / f"{name}.py"
    words = [word.capitalize() for word in name.split("_") if word]
    text = (
        TEMPLATE.read_text(encoding="utf-8").replace("CLASS", "".join(words)).replace("NAME", name)
    )
    with storage_errors(file):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with file.open("x", encoding="utf-8") as out:
                out.write(text)
        except FileExistsError:
            raise StorageError(f"{file} is there already; nothing was written") from None
    return file
