"""What an environment's header requires (PEP 723) is installed where it touches nobody else."""

import importlib.metadata
import zipfile
from pathlib import Path

import pytest

from lachesis.base.errors import RequirementsError
from lachesis.environment_catalog import lookup, requirements
from lachesis.environment_catalog.requirements import ScriptRequirements

HEADER = "# /// script\n# dependencies = [{}]\n# ///\n"
ENVIRONMENT = """
import iniconfig
from atroposlib.envs.base import BaseEnv, BaseEnvConfig

class NeedyConfig(BaseEnvConfig):
    told: str = iniconfig.TOLD

class Needy(BaseEnv):
    name = "needy"
    env_config_cls = NeedyConfig

    @classmethod
    def config_init(cls):
        return NeedyConfig(), []
"""


def write(folder, header, body=ENVIRONMENT):
    file = folder / "needy.py"
    file.write_text(header + body)
    return file


def wheel(folder, name, version, code):
    """The smallest one that pip takes."""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as out:
        out.writestr(f"{name}.py", code)
        about = f"{name}-{version}.dist-info"
        out.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        out.writestr(
            f"{about}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        out.writestr(f"{about}/RECORD", "")


def test_a_file_without_a_header_requires_nothing(tmp_path):
    assert requirements.read_requirements(write(tmp_path, "")) == ScriptRequirements()
    assert requirements.read_requirements(
        write(tmp_path, HEADER.format('"a>=1", "b[c]; python_version > \'3\'"'))
    ).dependencies == ("a>=1", "b[c]; python_version > '3'")


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("# /// script\n# dependencies = []\n", "the line '' between '# /// script'"),
        ("# /// script\nimport os\n# ///\n", "the line 'import os' between '# /// script'"),
        ("# /// script\n# dependencies = [\n# ///\n", "cannot be used"),
        ('# /// script\n# dependencies = "a"\n# ///\n', "dependencies must be a list of strings"),
        (HEADER.format('"no such thing!"'), "cannot be used"),
        ('# /// script\n# requires-python = "new"\n# ///\n', "cannot be used"),
    ],
)
def test_a_header_that_cannot_be_read_is_named(tmp_path, header, said):
    with pytest.raises(RequirementsError, match=r"needy\.py") as caught:
        requirements.read_requirements(write(tmp_path, header))
    assert said in str(caught.value)


def test_what_is_here_already_is_not_installed_again():
    have = importlib.metadata.version("pytest")
    assert (
        requirements.list_missing_requirements(
            ScriptRequirements(
                (f"pytest=={have}", "pytest>=1", "nothing-of-this; sys_platform == 'win32'")
            )
        )
        == []
    )
    assert requirements.list_missing_requirements(
        ScriptRequirements(("pytest<1", "nothing-of-this"))
    ) == ["pytest<1", "nothing-of-this"]


def test_another_python_is_refused(tmp_path):
    with pytest.raises(RequirementsError, match=r"requires Python >=9; this is 3\."):
        requirements.find_interpreter(
            write(tmp_path, '# /// script\n# requires-python = ">=9"\n# ///\n')
        )


def test_an_environment_has_its_own_version_beside_ours(tmp_path, clean_environment, monkeypatch):
    """The package that it requires is here in another version; ours stays, and the rest of ours is
    there for it too.
    """
    before = importlib.metadata.version("iniconfig")
    wheel(tmp_path, "iniconfig", "0.0.1", "TOLD = 'from the place of its own'\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    write(tmp_path, HEADER.format('"iniconfig==0.0.1"'))
    environment = lookup.find_environment("needy", [tmp_path])
    with pytest.raises(
        RequirementsError,
        match=r"requires iniconfig==0.0.1, which is not installed.*lachesis env install",
    ):
        lookup.load_schema(environment)
    place = requirements.install_requirements(Path(environment.file_path))
    assert requirements.find_interpreter(Path(environment.file_path)) == str(
        place / "bin" / "python"
    )
    assert lookup.load_schema(environment).values["told"] == "from the place of its own"
    assert importlib.metadata.version("iniconfig") == before
    started = (place / "installed.txt").stat().st_mtime_ns
    assert requirements.install_requirements(Path(environment.file_path)) == place
    assert (place / "installed.txt").stat().st_mtime_ns == started, "it already exists"


@pytest.mark.long
def test_what_pip_says_is_told_and_half_a_place_is_made_anew(
    tmp_path: Path, clean_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("SECRET_TOKEN", "s3cr3t-s3cr3t")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "s3cr3t-s3cr3t"))
    file = write(tmp_path, HEADER.format('"nothing-of-this==1"'))
    with pytest.raises(
        RequirementsError, match=r"(?s)nothing-of-this==1 cannot be.*No matching distribution"
    ) as caught:
        requirements.install_requirements(file)
    assert "s3cr3t" not in str(caught.value)
    wheel(tmp_path, "nothing_of_this", "1", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    requirements.install_requirements(file)
    assert requirements.find_interpreter(file).endswith("/bin/python")
