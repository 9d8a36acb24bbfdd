"""A training as a file: written with every field, started, and begun like another run."""

import json
import shutil

import jsonschema
import pytest
import yaml

from lachesis.config.field_edits import ConfigFields
from lachesis.config.run_config import resolve_run_config
from lachesis.launch.launch_file import OWN_FIELDS, make_similar_spec, read_launch_file
from lachesis.operations.launches import preview_launch
from lachesis.runs.store import RunStore
from tests.harness.home import make_record

RUN = "0123abcd"


@pytest.fixture
def written(tmp_path, shown):
    """The file that `lachesis config arithmetic` writes."""
    file = tmp_path / "RUN.yaml"
    file.write_text(shown("config", "arithmetic"))
    return file


def resolve(request):
    return preview_launch(RunStore(), request).launch.config


def test_a_file_has_every_field_and_describes_the_default_launch(written, shown):
    content = yaml.safe_load(written.read_text())
    fields = ConfigFields("embedded", is_owner=True).by_name
    names = {
        f"{section}.{field}"
        for section in ("env", "tinker", "limits")
        for field in content[section]
    }
    unlocked = {name for name, field in fields.items() if field.lock_reason is None}
    assert {name for name in unlocked - OWN_FIELDS if not name.startswith("rollouts.")} <= names
    assert "env.data_seed" in names, "a field of the environment's own"
    text = " ".join(written.read_text().replace("#", " ").split())
    for field in fields.values():
        if field.lock_reason is None and f"{field.section}.{field.name}" not in OWN_FIELDS:
            assert " ".join(field.description.split()) in text, field.name
    assert "default: 0.0015" in text, "the learning rate of the profile"
    request = read_launch_file(written, 60.0)
    assert request.settings == {}, "every value is the default"
    schema = json.loads(shown("config", "arithmetic", "--schema"))
    jsonschema.validate(content, schema)


def test_what_a_file_changes_is_what_the_launch_sets(written):
    text = written.read_text()
    changed = text.replace("learning_rate: ", "learning_rate: 0.00123 # was ", 1)
    written.write_text(changed.replace("name: null", "name: from a file", 1))
    request = read_launch_file(written, 60.0)
    assert (request.settings, request.name) == ({"tinker.learning_rate": 0.00123}, "from a file")
    assert resolve(request).tinker.learning_rate == 0.00123


def test_options_have_priority_over_the_file(written, shown):
    written.write_text("environment: arithmetic\ntinker: {learning_rate: 0.5, seed: 3}\n")
    answer = json.loads(
        shown("train", str(written), "--set", "learning_rate=0.25", "--dry-run", "--json")
    )
    assert answer["set_fields"] == {"tinker.learning_rate": 0.25, "tinker.seed": 3}
    assert [service["name"] for service in answer["services"]] == [
        "engine",
        "api",
        "trainer",
        "environment",
    ]
    assert not list(RunStore().root.glob("*")), "nothing was written"


def test_an_environment_is_found_beside_the_file(own, tmp_path, shown):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    shutil.copy(own, folder / "own.py")
    (folder / "run.yml").write_text("environment: own.py\n")
    shown = shown("train", str(folder / "run.yml"), "--dry-run")
    assert "own" in shown
    assert "Nothing was started" in shown


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("environment: arithmetic\ntinker: {learning_rat: 1}\n", "no field 'tinker.learning_rat'"),
        ("environment: arithmetic\nlearning_rate: 1\n", "learning_rate"),
        ("environment: arithmetic\nenv: 5\n", "env is 5; allowed: fields"),
        ("environment: arithmetic\nenv: {group_size: many}\n", "env.group_size is 'many'"),
        ("environment: arithmetic\nprofile: cloud\n", "cloud"),
        ("environment: arithmetic\nopenai: {}\n", "openai"),
        ("- a\n", "describes no launch; `lachesis config ENV > RUN.yaml`"),
        ("a: [\n", "is not YAML"),
        ("lachesis: {}\nenv: {}\n", "`lachesis train --like RUN` begins another one"),
        ("{}\n", "environment is missing"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path, content, message, shown):
    file = tmp_path / "wrong.yaml"
    file.write_text(content)
    shown = shown("train", str(file), "--dry-run", code=1)
    assert message in shown
    assert "\n" not in shown.strip()


def test_a_file_that_is_not_there_is_refused(shown):
    assert "cannot be read: No such file" in shown("train", "none.yaml", code=1)
    assert "nothing says what to train on" in shown("train", code=1)


def make_run(store, model, edits, **changes):
    config = resolve_run_config("arithmetic", "embedded", edits, model=model)
    record = make_record(run_id=RUN, environment="arithmetic", base_model=model, **changes)
    store.create(record, config.to_yaml())


def test_a_run_like_another_one_has_its_settings(random_model, shown):
    """Also those that nobody had set, but that are not the defaults any more."""
    store = RunStore()
    edits = {"tinker": {"learning_rate": 0.5, "seed": 9}, "env": {"group_size": 8}}
    make_run(store, random_model, edits, tags=["a"])
    spec = make_similar_spec(store, store.load(RUN), None, 60.0)
    assert spec.list_edits() == {"tinker.learning_rate": 0.5, "tinker.seed": 9, "env.group_size": 8}
    assert (spec.model, spec.tags) == (random_model, ["a"])
    content = yaml.safe_load(shown("config", "--like", "@last"))
    assert content["tinker"]["learning_rate"] == 0.5
    assert content["model"] == random_model


def test_a_run_like_another_one_with_another_seed(random_model, shown):
    store = RunStore()
    make_run(store, random_model, {"tinker": {"learning_rate": 0.5}})
    words = ["train", "--like", RUN[:3], "--seed", "4", "--set", "group_size=8", "--dry-run"]
    answer = json.loads(shown(*words, "--json"))
    assert answer["set_fields"] == {
        "tinker.learning_rate": 0.5,
        "env.group_size": 8,
        "tinker.seed": 4,
    }
    assert answer["model"] == random_model
    assert "Nothing was started" in shown(*words)
