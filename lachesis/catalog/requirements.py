"""What an environment's file requires by its header (PEP 723), and the place of its own where that is installed when asked.

# /// script
# dependencies = ["verifiers>=0.1.14,<0.2"]
# ///

The place is a virtual environment that sees the packages of this one behind its own. What both need is there once, and what the
file needs in another version touches nobody else.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import platform
import shutil
import site
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from lachesis.base import paths
from lachesis.base.errors import RequirementsError, StorageError
from lachesis.base.secrets import redact

BEGIN, END = "# /// script", "# ///"
LINES = 15


DISTRIBUTIONS = {
    "bs4": "beautifulsoup4", "Crypto": "pycryptodome", "cv2": "opencv-python", "dateutil": "python-dateutil",
    "dotenv": "python-dotenv", "git": "gitpython", "PIL": "pillow", "skimage": "scikit-image", "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}  # fmt: skip
"""Packages that are imported by another name than they are installed by."""


@dataclass(frozen=True)
class Declared:
    """`python` is a range of versions, or empty for any."""

    dependencies: tuple[str, ...] = ()
    python: str = ""


def declared(file: Path) -> Declared:
    """What the file's header says. Raises RequirementsError for one that cannot be read as PEP 723 asks."""
    try:
        text = "\n".join(_block(file.read_text(encoding="utf-8", errors="replace").splitlines()))
        found = tomllib.loads(text)
        dependencies, python = found.get("dependencies", []), found.get("requires-python", "")
        if not isinstance(dependencies, list) or not isinstance(python, str):
            raise ValueError("dependencies is a list of texts, requires-python a text")
        for one in dependencies:
            Requirement(one)
        SpecifierSet(python)
    except OSError as error:
        raise RequirementsError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, InvalidRequirement, InvalidSpecifier) as error:
        raise RequirementsError(f"the header of {file} (PEP 723) cannot be used: {error}") from error
    return Declared(tuple(dependencies), python)


def _block(lines: list[str]) -> Iterator[str]:
    """The TOML of the header, without its signs of comment."""
    if BEGIN not in lines:
        return
    for line in lines[lines.index(BEGIN) + 1 :]:
        if line == END:
            return
        if line != "#" and not line.startswith("# "):
            raise ValueError(f"the line {line[:60]!r} stands between {BEGIN!r} and {END!r}; each begins with '# '")
        yield line[2:]
    raise ValueError(f"{BEGIN!r} has no {END!r} behind it")


def unmet(found: Declared) -> list[str]:
    """The dependencies that the packages here do not satisfy."""
    return [one for one in found.dependencies if not _is_met(Requirement(one))]


def _is_met(wanted: Requirement, extra: str = "") -> bool:
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
        return True
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    if wanted.url or not wanted.specifier.contains(version, prereleases=True):
        return False
    needs = [Requirement(one) for one in importlib.metadata.requires(wanted.name) or ()] if wanted.extras else []
    return all(_is_met(need, name) for name in wanted.extras for need in needs if "extra" in str(need.marker))


def interpreter(file: Path) -> str:
    """The Python that runs this environment: that of its own place where it has one, else the one that runs this. Raises
    RequirementsError for what is not installed. A file that is gone is told by whoever wants to run it."""
    if not file.is_file():
        return sys.executable
    found = declared(file)
    _require_python(file, found)
    if found.dependencies and _mark(place := _place(found)).is_file():
        return str(place / "bin" / "python")
    if missing := unmet(found):
        raise RequirementsError(
            f"{file} requires {', '.join(missing)}, which is not installed here; `lachesis env install {file}` installs it, "
            "in a place of its own"
        )
    return sys.executable


def import_advice(file: Path, error: BaseException) -> str:
    """Return what makes an import work that has failed for a missing package; "" for any other error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    package = error.name.partition(".")[0]
    if package in sys.modules:
        return f"{package} is there, but it has no module {error.name}: another version of it may be needed"
    name = DISTRIBUTIONS.get(package, package)
    try:
        dependencies = declared(file).dependencies
    except RequirementsError:
        dependencies = ()
    if dependencies:
        change = f'add "{name}" to `dependencies` in the header of {file}'
    else:
        change = f'write this header into {file}:\n{BEGIN}\n# dependencies = ["{name}"]\n{END}\n'
    return (
        f"the package {package} is not installed. To install it for this file, {change}"
        f"{', ' if dependencies else ''}then run `lachesis env install {file}`. To install it for all: "
        f"`{sys.executable} -m pip install {name}`"
    )


def install(file: Path) -> Path:
    """Make the place, unless it is there; its path. Raises RequirementsError with the end of what pip said."""
    found = declared(file)
    _require_python(file, found)
    place = _place(found)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _mark(place).is_file():
                shutil.rmtree(place, ignore_errors=True)  # half of one, whose maker was ended
                _make(place, found.dependencies)
    except OSError as error:
        raise StorageError(f"{place} cannot be made: {error}") from error
    return place


def _make(place: Path, dependencies: tuple[str, ...]) -> None:
    log = place.with_suffix(".log")
    try:
        venv.create(place, with_pip=True, symlinks=True)
        here = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(place), "platbase": str(place)}))
        lines = [f"import site; site.addsitedir({one!r})\n" for one in here]  # each is run by itself
        (packages / "behind.pth").write_text("".join(lines), encoding="utf-8")
        with log.open("wb") as stream:
            command = [str(place / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
            subprocess.run([*command, *dependencies], stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, check=True)
    except subprocess.CalledProcessError as error:
        said = log.read_text(errors="replace") if log.is_file() else (error.output or b"").decode(errors="replace")
        last = "\n".join(said.splitlines()[-LINES:])
        raise RequirementsError(f"{', '.join(dependencies)} cannot be installed (see {log}):\n{redact(last)}") from error
    _mark(place).write_text("\n".join(dependencies), encoding="utf-8")


def _require_python(file: Path, found: Declared) -> None:
    if not SpecifierSet(found.python).contains(platform.python_version(), prereleases=True):
        raise RequirementsError(f"{file} requires Python {found.python}; this is {platform.python_version()}")


def _place(found: Declared) -> Path:
    """One for all files that require the same, of this Python and beside these packages."""
    about = (sorted(found.dependencies), sys.version, sys.prefix)
    return paths.home() / "cache" / "packages" / hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def _mark(place: Path) -> Path:
    return place / "installed.txt"
