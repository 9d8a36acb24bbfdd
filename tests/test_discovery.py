"""Environments are found by reading, and asked in a child that may crash, hang or print."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lachesis import discovery
from lachesis.errors import EnvironmentLoadError, EnvironmentTimeoutError, UnknownEnvironmentError

BASE = "from atroposlib.envs.base import BaseEnv, BaseEnvConfig\n"


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)


def names(folder: Path) -> list[tuple[str, str]]:
    return [(one.name, one.class_name) for one in discovery.scan([folder]).environments]


def test_direct_indirect_renamed_and_qualified_bases_are_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        direct=BASE + 'class A(BaseEnv):\n    """Does A.\n\n    More."""\n    name = "alpha"\n    env_config_cls = AConfig\n',
        indirect="from direct import A\nclass B(A):\n    pass\n",
        renamed="from atroposlib.envs.base import BaseEnv as Root\nclass C(Root):\n    pass\n",
        qualified="import atroposlib.envs.base as base\nclass D(base.BaseEnv):\n    pass\n",
        other="class E(Enum):\n    pass\n",
        _hidden=BASE + "class F(BaseEnv):\n    pass\n",
    )
    assert sorted(names(tmp_path)) == [("alpha", "A"), ("indirect", "B"), ("qualified", "D"), ("renamed", "C")]
    alpha = discovery.find("alpha", [tmp_path])
    assert (alpha.description, alpha.config_class) == ("Does A.", "AConfig")


def test_a_base_that_is_extended_in_its_own_file_is_not_offered(tmp_path: Path) -> None:
    write(tmp_path, both=BASE + "class Base(BaseEnv):\n    pass\nclass Real(Base):\n    pass\n")
    assert names(tmp_path) == [("both", "Real")]


def test_the_file_is_not_imported(tmp_path: Path) -> None:
    flag = tmp_path / "imported"
    write(tmp_path, trap=f"open({str(flag)!r}, 'w')\n" + BASE + "class A(BaseEnv):\n    pass\n")
    assert names(tmp_path) == [("trap", "A")]
    assert not flag.exists()


def test_a_syntax_error_is_told_and_hides_nobody_else(tmp_path: Path) -> None:
    write(tmp_path, broken="class A(:\n", good=BASE + "class B(BaseEnv):\n    pass\n")
    result = discovery.scan([tmp_path])
    assert [one.name for one in result.environments] == ["good"]
    assert result.problems[str(tmp_path / "broken.py")].startswith("SyntaxError, line 1")
    with pytest.raises(EnvironmentLoadError, match=r"broken\.py does not parse: SyntaxError, line 1"):
        discovery.find("broken", [tmp_path])


def test_an_unknown_name_is_told_with_those_there_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path, mine=BASE + "class A(BaseEnv):\n    pass\n")
    monkeypatch.setenv("LACHESIS_ENVIRONMENTS", str(tmp_path))
    with pytest.raises(UnknownEnvironmentError, match="no environment 'gsm9k'; available: arithmetic, mine") as caught:
        discovery.find("gsm9k")
    assert caught.value.details == {"available": ["arithmetic", "mine"]}


def test_the_schema_comes_from_the_environment_itself_and_is_cached() -> None:
    environment = discovery.find("arithmetic")
    schema = discovery.schema(environment)
    assert schema.warning is None
    assert schema.values["largest"] == 9
    assert schema.properties["largest"]["maximum"] == 999
    started = time.monotonic()
    assert discovery.schema(environment) == schema
    assert time.monotonic() - started < 1
    assert discovery.check_values(environment, {"largest": 5}) == []
    assert discovery.check_values(environment, {"largest": 0}) == [
        {"field": "largest", "message": "largest is 0: Input should be greater than or equal to 1"}
    ]


def test_an_import_that_raises_is_shown_with_its_traceback(tmp_path: Path) -> None:
    write(tmp_path, bad="print('noise')\nraise RuntimeError('no data')\n" + BASE + "class A(BaseEnv):\n    pass\n")
    with pytest.raises(EnvironmentLoadError, match=r"(?s)cannot be imported: RuntimeError: no data.*line 2, in <module>"):
        discovery.schema(discovery.find("bad", [tmp_path]))


def test_an_import_that_ends_the_process_is_told(tmp_path: Path) -> None:
    write(tmp_path, bad="import os\nprint('last words', flush=True)\nos._exit(7)\n" + BASE + "class A(BaseEnv):\n    pass\n")
    with pytest.raises(EnvironmentLoadError, match=r"(?s)ended the process \(exit code 7\).*last words"):
        discovery.schema(discovery.find("bad", [tmp_path]))


def test_an_import_that_hangs_is_given_up(tmp_path: Path) -> None:
    write(tmp_path, slow="import time\nprint('loading', flush=True)\ntime.sleep(60)\n" + BASE + "class A(BaseEnv):\n    pass\n")
    started = time.monotonic()
    with pytest.raises(EnvironmentTimeoutError, match=r"(?s)still being imported after 2 s.*loading"):
        discovery.schema(discovery.find("slow", [tmp_path]), timeout_s=2)
    assert time.monotonic() - started < 10


def test_a_config_init_that_fails_falls_back_to_the_general_fields(tmp_path: Path) -> None:
    text = BASE + "class A(BaseEnv):\n    @classmethod\n    def config_init(cls):\n        raise ValueError('needs a key')\n"
    write(tmp_path, fallback=text)
    schema = discovery.schema(discovery.find("fallback", [tmp_path]))
    assert "needs a key" in (schema.warning or "")
    assert "group_size" in schema.properties
