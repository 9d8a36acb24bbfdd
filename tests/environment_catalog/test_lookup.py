"""Environments are found by reading, and asked in a child that may crash, hang or print."""

import shlex
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from lachesis.base.errors import (
    EnvironmentLoadError,
    EnvironmentTimeoutError,
    UnknownEnvironmentError,
)
from lachesis.environment_catalog import fingerprint, lookup
from lachesis.environment_process import model_free_check

BASE = "from atroposlib.envs.base import BaseEnv, BaseEnvConfig\n"


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)


def names(folder):
    return [
        (environment.name, environment.class_name)
        for environment in lookup.scan_environments([folder]).environments
    ]


def test_direct_indirect_renamed_and_qualified_bases_are_found(tmp_path):
    write(
        tmp_path,
        direct=BASE
        + 'class A(BaseEnv):\n    """Does A,\n    and B. More.\n\n    Much more."""\n    '
        'name = "alpha"\n    '
        "env_config_cls = AConfig\n",
        indirect="from direct import A\nclass B(A):\n    pass\n",
        renamed="from atroposlib.envs.base import BaseEnv as Root\nclass C(Root):\n    pass\n",
        qualified="import atroposlib.envs.base as base\nclass D(base.BaseEnv):\n    pass\n",
        other="class E(Enum):\n    pass\n",
        _hidden=BASE + "class F(BaseEnv):\n    pass\n",
    )
    assert sorted(names(tmp_path)) == [
        ("alpha", "A"),
        ("indirect", "B"),
        ("qualified", "D"),
        ("renamed", "C"),
    ]
    alpha = lookup.find_environment("alpha", [tmp_path])
    assert (alpha.description, alpha.config_class) == ("Does A, and B.", "AConfig")


def test_a_base_that_is_extended_in_its_own_file_is_not_offered(tmp_path):
    write(tmp_path, both=BASE + "class Base(BaseEnv):\n    pass\nclass Real(Base):\n    pass\n")
    assert names(tmp_path) == [("both", "Real")]


def test_the_file_is_not_imported(tmp_path):
    flag = tmp_path / "imported"
    write(tmp_path, trap=f"open({str(flag)!r}, 'w')\n" + BASE + "class A(BaseEnv):\n    pass\n")
    assert names(tmp_path) == [("trap", "A")]
    assert not flag.exists()


def test_a_syntax_error_is_told_and_hides_nobody_else(tmp_path):
    write(tmp_path, broken="class A(:\n", good=BASE + "class B(BaseEnv):\n    pass\n")
    result = lookup.scan_environments([tmp_path])
    assert [environment.name for environment in result.environments] == ["good"]
    assert result.problems[str(tmp_path / "broken.py")].startswith("SyntaxError, line 1")
    with pytest.raises(
        EnvironmentLoadError, match=r"broken\.py does not parse: SyntaxError, line 1"
    ):
        lookup.find_environment("broken", [tmp_path])


def test_an_unknown_name_is_told_with_those_there_are(monkeypatch, tmp_path):
    write(tmp_path, mine=BASE + "class A(BaseEnv):\n    pass\n")
    monkeypatch.setenv("LACHESIS_ENVIRONMENTS", str(tmp_path))
    with pytest.raises(
        UnknownEnvironmentError,
        match=r"no environment .gsm9k.; did you mean gsm8k; available: arithmetic, .*, mine",
    ) as caught:
        lookup.find_environment("gsm9k")
    assert {"arithmetic", "mine"} <= set(caught.value.details["available"])
    with pytest.raises(UnknownEnvironmentError) as caught:
        lookup.find_environment("gsm9k", [tmp_path / "elsewhere"])
    assert f"(searched {tmp_path / 'elsewhere'};" in str(caught.value), "and nothing else"


def test_the_schema_comes_from_the_environment_itself_and_is_cached(monkeypatch):
    environment = lookup.find_environment("arithmetic")
    schema = lookup.load_schema(environment)
    assert schema.warning is None
    assert schema.values["largest"] == 9
    assert schema.properties["largest"]["maximum"] == 999
    with monkeypatch.context() as patch:
        patch.setattr(
            lookup, "_run_child", lambda *values, **options: pytest.fail("it was learnt before")
        )
        assert lookup.load_schema(environment) == schema
    # its schema says that already
    assert lookup.check_values(environment, schema, {"largest": 0}) == []
    strict = replace(schema, checks=True)
    assert lookup.check_values(environment, strict, {"largest": 5}) == []
    assert lookup.check_values(environment, strict, {"largest": 0}) == [
        {"field": "largest", "message": "largest is 0: Input should be greater than or equal to 1"}
    ]


def test_an_import_that_raises_is_told_on_one_line(tmp_path):
    """It has the place in the file, and a command that shows the traceback."""
    write(
        tmp_path,
        bad="print('noise')\nraise RuntimeError('no data')\n"
        + BASE
        + "class A(BaseEnv):\n    pass\n",
    )
    with pytest.raises(
        EnvironmentLoadError,
        match=r"cannot be imported: RuntimeError at [\w.]+:2: no data; `.+` shows the traceback$",
    ) as raised:
        lookup.load_schema(lookup.find_environment("bad", [tmp_path]))
    command = shlex.split(raised.value.message.split("`")[1])
    shown = subprocess.run(command, capture_output=True, text=True, cwd="/").stderr
    assert shown.endswith("RuntimeError: no data\n")
    assert raised.value.details["traceback"].endswith("RuntimeError: no data\n")


def test_an_import_that_ends_the_process_is_told(tmp_path):
    write(
        tmp_path,
        bad="import os\nprint('last words', flush=True)\nos._exit(7)\n"
        + BASE
        + "class A(BaseEnv):\n    pass\n",
    )
    with pytest.raises(
        EnvironmentLoadError, match=r"(?s)ended the process \(exit code 7\).*last words"
    ):
        lookup.load_schema(lookup.find_environment("bad", [tmp_path]))


def test_an_import_that_hangs_is_given_up(tmp_path):
    write(
        tmp_path,
        slow="import time\nprint('loading', flush=True)\ntime.sleep(60)\n"
        + BASE
        + "class A(BaseEnv):\n    pass\n",
    )
    started = time.monotonic()
    with pytest.raises(
        EnvironmentTimeoutError, match=r"(?s)still being imported after 2 s.*loading"
    ):
        lookup.load_schema(lookup.find_environment("slow", [tmp_path]), timeout_s=2)
    assert time.monotonic() - started < 10


def test_a_config_init_that_fails_falls_back_to_the_general_fields(tmp_path):
    text = (
        BASE + "class A(BaseEnv):\n    @classmethod\n    def config_init(cls):\n        raise "
        "ValueError('needs a key')\n"
    )
    write(tmp_path, fallback=text)
    schema = lookup.load_schema(lookup.find_environment("fallback", [tmp_path]))
    assert "needs a key" in (schema.warning or "")
    assert "group_size" in schema.properties


def test_a_base_of_this_project_is_a_base_environment(tmp_path):
    write(
        tmp_path,
        own="from lachesis.environment import TaskEnv\nclass A(TaskEnv):\n    name = 'a'\n",
        renamed="from lachesis.environment import ConversationEnv as Talk\nclass B(Talk):\n    "
        "pass\n",
        qualified="import lachesis.environment\nclass C(lachesis.environment.TaskEnv):\n    pass\n",
        whole="from lachesis import environment\nclass D(environment.TaskEnv):\n    pass\n",
        other="from elsewhere import TaskEnv\nclass E(TaskEnv):\n    pass\n",
    )
    assert names(tmp_path) == [("a", "A"), ("qualified", "C"), ("renamed", "B"), ("whole", "D")]


def test_a_file_stands_for_its_environment(tmp_path, monkeypatch):
    write(
        tmp_path,
        mine=BASE + "class A(BaseEnv):\n    name = 'arithmetic'\n",
        empty="x = 1\n",
        broken="class A(:\n",
    )
    monkeypatch.setenv("LACHESIS_ENVIRONMENTS", "")
    assert lookup.register_environment("arithmetic") == "arithmetic"
    name = lookup.register_environment(str(tmp_path / "mine.py"))
    assert name == "mine", "its own name is taken by another file"
    assert lookup.find_environment(name).file_path == str(tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    assert lookup.register_environment("mine") == "mine"
    with pytest.raises(UnknownEnvironmentError, match=r"name the file as empty\.py"):
        lookup.register_environment("empty")
    with pytest.raises(UnknownEnvironmentError, match="there is no file"):
        lookup.register_environment(str(tmp_path / "gone.py"))
    with pytest.raises(
        UnknownEnvironmentError,
        match="holds no class that inherits from one of BaseEnv, ConversationEnv",
    ):
        lookup.register_environment(str(tmp_path / "empty.py"))
    with pytest.raises(EnvironmentLoadError, match="does not parse"):
        lookup.register_environment(str(tmp_path / "broken.py"))


def test_an_environment_without_examples_says_what_is_missing(tmp_path):
    write(tmp_path, silent=BASE + "class Silent(BaseEnv):\n    pass\n")
    lookup.register_environment(str(tmp_path / "silent.py"))
    silent = lookup.find_environment("silent")
    with pytest.raises(
        EnvironmentLoadError, match=r"Silent has no method example\(item, right=…\)"
    ):
        lookup.collect_examples(silent, {}, count=1, share=1.0)


def test_an_environment_of_plain_atropos_gives_examples():
    arithmetic = lookup.find_environment("arithmetic")
    right = lookup.collect_examples(arithmetic, {}, count=20, share=1.0)
    wrong = lookup.collect_examples(arithmetic, {}, count=20, share=0.0)
    for (question, answer), is_right in [(pair, True) for pair in right] + [
        (pair, False) for pair in wrong
    ]:
        first, second = question["content"].rstrip("=").split("+")
        assert (int(answer["content"]) == int(first) + int(second)) is is_right


def test_folders_below_are_searched_and_a_taken_name_is_told(tmp_path):
    write(tmp_path, first=BASE + "class A(BaseEnv):\n    name = 'task'\n")
    for folder in ("community/games", ".venv", "_old", "tests"):
        (tmp_path / folder).mkdir(parents=True)
        write(tmp_path / folder, second=BASE + "class B(BaseEnv):\n    name = 'task'\n")
    found = lookup.scan_environments([tmp_path])
    assert [(environment.name, environment.class_name) for environment in found.environments] == [
        ("task", "A"),
        ("second", "B"),
    ]
    place = tmp_path / "community" / "games" / "second.py"
    assert found.clashes == {
        "second": f"{place}: its name task is taken by {tmp_path / 'first.py'}"
    }


def test_a_file_of_a_searched_folder_keeps_its_name(tmp_path, monkeypatch):
    write(tmp_path, mine=BASE + "class A(BaseEnv):\n    name = 'own'\n")
    monkeypatch.setenv("LACHESIS_ENVIRONMENTS", str(tmp_path))
    assert lookup.register_environment(str(tmp_path / "mine.py")) == "own"
    assert not lookup.scan_environments().clashes


def test_files_of_one_name_in_several_folders_are_told_apart(tmp_path):
    places = [tmp_path / one for one in ("a", "b", "c", "d")]
    for place in places:
        place.mkdir()
        write(place, x=BASE + "class X(BaseEnv):\n    pass\n")
    found = lookup.scan_environments(places)
    assert [environment.name for environment in found.environments] == [
        "x",
        "x-X",
        "x-X-2",
        "x-X-3",
    ]
    assert lookup.find_environment("x-X-2", places).file_path == str(places[2] / "x.py")


PACKAGE = {
    "__init__": "",
    "base": BASE + "from .words import WORD\nclass Shared(BaseEnv):\n    word = WORD\n",
    "words": "WORD = 'in the package'\n",
    "server": (
        "from . import words\nfrom .base import Shared\nfrom atroposlib.envs.base import "
        "APIServerConfig, BaseEnvConfig\n"
        "class Server(Shared):\n    name = 'packed'\n"
        "    @classmethod\n    def config_init(cls):\n"
        "        return BaseEnvConfig(wandb_name=words.WORD), [APIServerConfig()]\n"
        "if __name__ == '__main__':\n    open('ran', 'w').write(f'{__package__} {Shared.word}')\n"
    ),
}


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "packed_env"
    folder.mkdir()
    write(folder, **PACKAGE)
    return folder


def test_a_module_of_a_package_imports_its_neighbours(package):
    found = lookup.find_environment("packed", [package.parent])
    assert lookup.load_schema(found).values["wandb_name"] == "in the package"
    assert fingerprint.compute_fingerprint(package / "server.py") != (
        before := fingerprint.compute_fingerprint(package / "base.py")
    )
    write(package, words="WORD = 'changed'\n")
    assert fingerprint.compute_fingerprint(package / "base.py") != before, (
        "what it imports is part of it"
    )
    assert lookup.load_schema(found).values["wandb_name"] == "changed"


def test_a_schema_is_about_the_source_whose_hash_it_is_kept_under(tmp_path, monkeypatch):
    """An editor may save the file between the first read and the start of the child."""
    text = PACKAGE["server"].replace("from . import words\nfrom .base import Shared\n", BASE)
    text = text.replace("Shared", "BaseEnv").replace("words.WORD", "'first'")
    write(tmp_path, packed=text)
    run_child = lookup.run_bounded

    def save_and_run(*values, **options):
        write(tmp_path, packed=text.replace("'first'", "'second'"))
        return run_child(*values, **options)

    environment = lookup.find_environment("packed", [tmp_path])
    monkeypatch.setattr(lookup, "run_bounded", save_and_run)
    assert lookup.load_schema(environment).values["wandb_name"] == "first"
    assert lookup.load_schema(environment).values["wandb_name"] == "second"


def test_a_file_is_compiled_by_its_own_rules(tmp_path):
    """The future statements of the module that compiles it do not count, and its encoding does."""
    file = tmp_path / "own.py"
    file.write_bytes(
        '# -*- coding: iso-8859-1 -*-\nclass Own:\n    """Ä"""\n    size: int\n'
        "if __name__ == '__main__':\n    open('ran', 'w').write(Own.__doc__ + "
        "Own.__annotations__['size'].__name__)\n".encode("iso-8859-1")
    )
    command = [sys.executable, "-P", "-m", "lachesis.environment_process", "run", str(file)]
    subprocess.run([*command, "serve"], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "ran").read_text() == "Äint"
    own = model_free_check.load_environment_class(file, "Own")
    assert own.__doc__ == "Ä"
    assert own.__annotations__ == {"size": int}


def test_a_module_of_a_package_runs_as_one(package, tmp_path):
    command = [
        sys.executable,
        "-P",
        "-m",
        "lachesis.environment_process",
        "run",
        str(package / "server.py"),
        "serve",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "ran").read_text() == "packed_env in the package"


def test_one_file_can_be_searched_with_what_it_imports(tmp_path):
    write(
        tmp_path,
        base=BASE + "class Shared(BaseEnv):\n    pass\n",
        mine="from base import Shared\nclass Mine(Shared):\n    pass\n",
        other=BASE + "class Other(BaseEnv):\n    pass\n",
    )
    assert [
        environment.name
        for environment in lookup.scan_environments([tmp_path / "mine.py"]).environments
    ] == ["mine"]


def test_code_that_a_field_names_is_part_of_the_hash(tmp_path):
    write(
        tmp_path,
        env=BASE + "class A(BaseEnv):\n    pass\n",
        mine="import helper\n",
        helper="x = 1\n",
        data="1",
    )
    file, values = (
        tmp_path / "env.py",
        {"function": f"{tmp_path / 'mine.py'}:reward", "size": 3, "other": "not/there.py"},
    )
    before = fingerprint.compute_fingerprint(file, values)
    assert before not in (
        fingerprint.compute_fingerprint(file),
        fingerprint.compute_fingerprint(file, {"file": str(tmp_path / "data.py")}),
    )
    write(tmp_path, helper="x = 2\n")
    assert fingerprint.compute_fingerprint(file, values) != before
    assert fingerprint.compute_fingerprint(file) == fingerprint.compute_fingerprint(
        file, {"size": 4}
    )
