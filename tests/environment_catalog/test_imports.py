"""Upstream files import their siblings by several roots; what is missing is named with what
installs it.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lachesis.base.errors import EnvironmentLoadError
from lachesis.environment_catalog import fingerprint, lookup, requirements
from tests.environment_catalog.test_requirements import wheel

TASK = """
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig


class Task(BaseEnv):
    name = "task"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(wandb_name=WORD), [APIServerConfig()]


if __name__ == "__main__":
    open("ran", "w").write(WORD)
"""
SHAPES = {  # the file, what it imports, and the module that it finds
    "own folder": (
        "environments/games/task.py",
        "from words import WORD",
        "environments/games/words.py",
    ),
    "repository": (
        "environments/games/task.py",
        "from environments.shared.words import WORD",
        "environments/shared/words.py",
    ),
    "repository, below": (
        "environments/a/b/task.py",
        "from environments.a.words import WORD",
        "environments/a/words.py",
    ),
    "relative": (
        "environments/games/task.py",
        "from .words import WORD",
        "environments/games/words.py",
    ),
    "relative, parent": (
        "environments/games/task.py",
        "from ..shared.words import WORD",
        "environments/shared/words.py",
    ),
    "own folder of a package": ("games/task.py", "from words import WORD", "games/words.py"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_siblings_are_found_by_every_root_that_upstream_uses(tmp_path, shape):
    """For the schema, for a run, and in the hash of the environment's code. What is installed comes
    first.
    """
    place, line, sibling = SHAPES[shape]
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "atroposlib").mkdir()
    (tmp_path / "atroposlib" / "__init__.py").write_text(
        "raise RuntimeError('the source beside the installed package')\n"
    )
    for name, text in ((place, line + TASK), (sibling, "WORD = 'found'\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if "of a package" in shape:
        (tmp_path / "games" / "__init__.py").touch()
    file = tmp_path / place
    environment = lookup.find_environment("task", [file.parent])
    assert lookup.load_schema(environment).values["wandb_name"] == "found"
    if shape in ("relative, parent", "own folder of a package"):
        subprocess.run(
            [sys.executable, "-P", "-m", "lachesis.environment_process", "run", str(file), "serve"],
            cwd=tmp_path,
            check=True,
        )
        assert (tmp_path / "ran").read_text() == "found"
    before = fingerprint.compute_fingerprint(file)
    (tmp_path / sibling).write_text("WORD = 'changed'\n")
    assert fingerprint.compute_fingerprint(file) != before


@pytest.mark.parametrize(
    ("folder", "line", "name"),
    [
        ("games", "from .words import WORD", "games.task"),
        ("a/games", "from ..words import WORD", "a.games.task"),
        ("games", "from words import WORD", None),
        ("json", "from .words import WORD", None),
        ("my games", "from .words import WORD", None),
        ("games", "from .words import", None),
    ],
)
def test_relative_imports_make_a_package_of_a_folder_whose_name_is_free(
    tmp_path, folder, line, name
):
    """Others run as files that stand alone, whose imports may have another way when the relative
    one fails.
    """
    (file := tmp_path / folder / "task.py").parent.mkdir(parents=True)
    file.write_text(f"{line}\n")
    assert fingerprint.get_module_name(file) == name


def test_the_shelf_is_hashed_without_the_program_around_it():
    shelf = Path(__file__).resolve().parents[2] / "environments"
    assert fingerprint.list_source_files(shelf / "countdown.py") == {shelf / "countdown.py"}


@pytest.mark.long
def test_following_the_advice_for_a_missing_package_makes_the_import_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "task.py"
    file.write_text("from lachesis_test_words import WORD\n" + TASK)
    environment = lookup.find_environment("task", [tmp_path])
    with pytest.raises(
        EnvironmentLoadError, match="the package lachesis_test_words is not installed"
    ) as missing:
        lookup.load_schema(environment)
    assert "Traceback" not in str(missing.value)
    header = re.search(r"^# /// script\n(# .*\n)+# ///\n", str(missing.value), re.MULTILINE)
    assert header is not None
    assert f"then run `lachesis env install {file}`" in str(missing.value)
    file.write_text(header.group() + file.read_text())
    wheel(tmp_path, "lachesis_test_words", "1", "WORD = 'installed'\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    requirements.install_requirements(file)
    assert lookup.load_schema(environment).values["wandb_name"] == "installed"


def test_the_advice_fits_the_file(tmp_path):
    file = tmp_path / "task.py"
    file.write_text('# /// script\n# dependencies = ["pytest"]\n# ///\n')
    named = requirements.get_import_advice(
        file, ModuleNotFoundError("No module named 'cv2'", name="cv2")
    )
    assert (
        f'add "opencv-python" to `dependencies` in the header of {file}, then run `lachesis env '
        f"install {file}`" in named
    )
    inner = requirements.get_import_advice(
        file, ModuleNotFoundError("No module named 'json.no'", name="json.no")
    )
    assert (
        inner
        == "json is installed, but it has no module json.no: another version of it may be needed"
    )
    assert requirements.get_import_advice(file, ImportError("cannot import name 'x'")) == ""
