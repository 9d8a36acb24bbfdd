"""Read which packages an environment's file requires, and install them in a virtual environment.

The file declares them in a header as PEP 723 defines it:

    # /// script
    # dependencies = ["verifiers>=0.1.14,<0.2"]
    # ///

The virtual environment also sees the packages of the one that Lachesis runs in. Packages that both
need are installed once, and other versions that the file needs affect nobody else.
"""

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
from lachesis.base.files import hold_file_lock, read_cached
from lachesis.base.secrets import redact

HEADER_BEGIN, HEADER_END = "# /// script", "# ///"
MAX_LOG_LINES = 15
# Packages whose import name differs from the name that pip installs.
DISTRIBUTIONS = {
    "bs4": "beautifulsoup4", "Crypto": "pycryptodome", "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv", "git": "gitpython", "PIL": "pillow", "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}  # fmt: skip


@dataclass(frozen=True)
class ScriptRequirements:
    """Hold the requirements of a file; an empty `python` range allows any version."""

    dependencies: tuple[str, ...] = ()
    python: str = ""


def read_requirements(file: Path) -> ScriptRequirements:
    """Return the requirements in the file's header.

    Raises:
        RequirementsError: The header does not follow PEP 723.
    """
    try:
        lines = read_cached(file).decode("utf-8", "replace").splitlines()
        text = "\n".join(_read_header_lines(lines))
        header = tomllib.loads(text)
        dependencies, python = header.get("dependencies", []), header.get("requires-python", "")
        if not isinstance(dependencies, list) or not isinstance(python, str):
            raise ValueError("dependencies must be a list of strings, and requires-python a string")
        dependencies = [_name_distribution(dependency) for dependency in dependencies]
        SpecifierSet(python)
    except OSError as error:
        raise RequirementsError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, InvalidRequirement, InvalidSpecifier) as error:
        raise RequirementsError(
            f"the header of {file} (PEP 723) cannot be used: {error}"
        ) from error
    return ScriptRequirements(tuple(dependencies), python)


def _name_distribution(dependency: str) -> str:
    """Return the dependency, with `lachesis` under the name by which pip finds it: another project
    has that name.

    Raises:
        InvalidRequirement: It is not a requirement.
    """
    requirement = Requirement(dependency)
    if requirement.name.lower() != "lachesis":
        return dependency
    requirement.name = paths.DISTRIBUTION
    return str(requirement)


def _read_header_lines(lines: list[str]) -> Iterator[str]:
    """Yield the lines of the header's TOML without their comment signs."""
    if HEADER_BEGIN not in lines:
        return
    for line in lines[lines.index(HEADER_BEGIN) + 1 :]:
        if line == HEADER_END:
            return
        if line != "#" and not line.startswith("# "):
            raise ValueError(
                f"the line {line[:60]!r} between {HEADER_BEGIN!r} and {HEADER_END!r} must begin "
                "with '# '"
            )
        yield line[2:]
    raise ValueError(f"{HEADER_BEGIN!r} is not followed by {HEADER_END!r}")


def list_missing_requirements(requirements: ScriptRequirements) -> list[str]:
    """Return the dependencies that the installed packages do not satisfy."""
    return [
        dependency
        for dependency in requirements.dependencies
        if not _is_met(Requirement(dependency))
    ]


def _is_met(requirement: Requirement, extra: str = "") -> bool:
    """Return whether a requirement is installed here, with its extras."""
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
        return True
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    if requirement.url or not requirement.specifier.contains(version, prereleases=True):
        return False
    if requirement.extras:
        extra_requirements = [
            Requirement(dependency)
            for dependency in importlib.metadata.requires(requirement.name) or ()
        ]
    else:
        extra_requirements = []
    return all(
        _is_met(need, name)
        for name in requirement.extras
        for need in extra_requirements
        if "extra" in str(need.marker)
    )


def find_interpreter(file: Path) -> str:
    """Return the Python interpreter for this environment's file.

    It is that of the file's virtual environment if it has one, else the one that runs Lachesis. A
    file that does not exist is not an error here.

    Raises:
        RequirementsError: A required package is not installed.
    """
    if not file.is_file():
        return sys.executable
    requirements = read_requirements(file)
    _check_python_version(file, requirements)
    if (
        requirements.dependencies
        and _get_marker_path(venv_folder := _get_venv_folder(requirements)).is_file()
    ):
        return str(venv_folder / "bin" / "python")
    if missing := list_missing_requirements(requirements):
        raise RequirementsError(
            f"{file} requires {', '.join(missing)}, which is not installed; `lachesis env install "
            f"{file}` installs it in a virtual environment of its own"
        )
    return sys.executable


def get_import_advice(file: Path, error: BaseException) -> str:
    """Return how to mend an import that failed because of a missing package, or an empty text."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    package = error.name.partition(".")[0]
    if package in sys.modules:
        return (
            f"{package} is installed, but it has no module {error.name}: another version of it may "
            "be needed"
        )
    name = DISTRIBUTIONS.get(package, package)
    try:
        dependencies = read_requirements(file).dependencies
    except RequirementsError:
        dependencies = ()
    if dependencies:
        change = f'add "{name}" to `dependencies` in the header of {file}'
    else:
        change = (
            f"write this header into {file}:\n"
            f'{HEADER_BEGIN}\n# dependencies = ["{name}"]\n{HEADER_END}\n'
        )
    return (
        f"the package {package} is not installed. To install it for this file, {change}"
        f"{', ' if dependencies else ''}then run `lachesis env install {file}`. To install it for "
        f"all environments: `{sys.executable} -m pip install {name}`"
    )


def install_requirements(file: Path) -> Path:
    """Create the virtual environment of a file unless it exists, and return its folder.

    Raises:
        RequirementsError: pip failed; the message ends with the last lines it printed.
    """
    requirements = read_requirements(file)
    _check_python_version(file, requirements)
    venv_folder = _get_venv_folder(requirements)
    try:
        venv_folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_file_lock(venv_folder.with_suffix(".lock")):
            if not _get_marker_path(venv_folder).is_file():
                # An earlier installation may have been killed half-way.
                shutil.rmtree(venv_folder, ignore_errors=True)
                _create_venv(venv_folder, requirements.dependencies)
    except OSError as error:
        raise StorageError(f"{venv_folder} cannot be created: {error}") from error
    return venv_folder


def _install(venv_folder: Path, dependencies: tuple[str, ...], log: Path) -> None:
    """Install packages with the environment's own pip, whose output goes to the log."""
    command = [str(venv_folder / "bin" / "python"), "-m", "pip", "install"]
    options = ["--disable-pip-version-check", "--no-input"]
    with log.open("wb") as stream:
        subprocess.run(
            [*command, *options, *dependencies],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            check=True,
        )


def _create_venv(venv_folder: Path, dependencies: tuple[str, ...]) -> None:
    """Make a virtual environment with these packages, behind those of this installation."""
    log = venv_folder.with_suffix(".log")
    try:
        venv.create(venv_folder, with_pip=True, symlinks=True)
        site_folders = dict.fromkeys(
            [*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        )
        site_packages = Path(
            sysconfig.get_path(
                "purelib", "venv", {"base": str(venv_folder), "platbase": str(venv_folder)}
            )
        )
        # Each line of a .pth file that begins with `import` is executed.
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site_folders]
        (site_packages / "behind.pth").write_text("".join(lines), encoding="utf-8")
        _install(venv_folder, dependencies, log)
    except subprocess.CalledProcessError as error:
        if log.is_file():
            pip_output = log.read_text(errors="replace")
        else:
            pip_output = (error.output or b"").decode(errors="replace")
        last_lines = "\n".join(pip_output.splitlines()[-MAX_LOG_LINES:])
        raise RequirementsError(
            f"{', '.join(dependencies)} cannot be installed (see {log}):\n{redact(last_lines)}"
        ) from error
    _get_marker_path(venv_folder).write_text("\n".join(dependencies), encoding="utf-8")


def _check_python_version(file: Path, requirements: ScriptRequirements) -> None:
    if not SpecifierSet(requirements.python).contains(platform.python_version(), prereleases=True):
        raise RequirementsError(
            f"{file} requires Python {requirements.python}; this is {platform.python_version()}"
        )


def _get_venv_folder(requirements: ScriptRequirements) -> Path:
    """Return the folder of all files with these requirements, Python and packages."""
    key_parts = (sorted(requirements.dependencies), sys.version, sys.prefix)
    return (
        paths.home()
        / "cache"
        / "packages"
        / hashlib.sha256(repr(key_parts).encode()).hexdigest()[:16]
    )


def _get_marker_path(venv_folder: Path) -> Path:
    return venv_folder / "installed.txt"
