"""Write the file of `lachesis env new`: a working environment to change."""

import keyword
import re
from pathlib import Path

from lachesis.base.errors import ConfigError, StorageError
from lachesis.base.files import storage_errors

NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,63}")
TEMPLATE = Path(__file__).with_name("new_environment.txt")


def write_scaffold(name: str, folder: Path) -> Path:
    """Write NAME.py into the folder, which is created if necessary, and return its path.

    Raises:
        ConfigError: Python cannot import a module of this name.
        StorageError: The file exists or cannot be written.
    """
    if not NAME_PATTERN.fullmatch(name) or keyword.iskeyword(name):
        allowed = (
            "small letters, digits and _, beginning with a letter, and not a keyword of Python"
        )
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
            raise StorageError(f"{file} already exists; nothing was written") from None
    return file
