"""The same launch, said at every surface, is the same spec byte for byte, or the same refusal."""

import json
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import pytest
import yaml
from starlette.testclient import TestClient

from lachesis.agent_tools import http_routes, launches
from lachesis.agent_tools.session import AgentSession
from lachesis.agent_tools.tools import TOOLS, CallContext
from lachesis.base.errors import LachesisError
from lachesis.cli.commands.train import TrainOptions, read_launch_spec
from lachesis.config.field_edits import ConfigFields
from lachesis.config.launch_spec import LaunchSpec, format_settings, read_spec
from lachesis.environment_catalog.lookup import find_environment, load_schema
from lachesis.launch.launch_file import EDITED_SECTIONS, read_launch_file
from lachesis.launch.resolve import resolve_launch
from lachesis.runs.store import RunStore
from tests.harness.command_line import parse_command
from tests.harness.properties import examples

ENVIRONMENT, TIMEOUT_S = "arithmetic", 60.0
# Fields that read files or look for programs, and that of another launch's environments.
LEFT_OUT = frozenset({"tinker.sft_file", "tinker.backend", "env.mixture", "tinker.trackers"})
FIELDS_OF_KEYS = {"steps": "env.total_steps", "seed": "tinker.seed"}
Values = Mapping[str, Any]
Said = tuple[str, ...] | str
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)


class Surfaces:
    """Say a launch at each surface; what each hands on to `resolve_launch`."""

    def __init__(self, folder, monkeypatch):
        self.store, self.folder = RunStore(), folder
        self.handed_on: list[LaunchSpec] = []
        monkeypatch.setattr(launches, "start_run", self._hand_on)
        self.client = TestClient(http_routes.create_app(), base_url="http://localhost:8080")

    def _hand_on(self, store, spec, *_, **__):
        self.handed_on.append(spec)
        raise LachesisError("this is as far as it goes")

    def say_in_command(self, settings, **keys):
        words = ["train", ENVIRONMENT, "--profile=embedded"]
        for name, value in settings.items():
            words += ["--set", f"{name}={_to_text(value)}"]
        words += [f"--tag={tag}" for tag in keys.pop("tags", ())]
        words += [f"--{name}={value}" for name, value in keys.items()]
        parsed = vars(parse_command(words))
        parsed.pop("command")
        return read_launch_spec(parsed.pop("environment"), TrainOptions(**parsed), self.store)

    def say_in_file(self, settings, **keys):
        content: dict[str, Any] = {"environment": ENVIRONMENT, "profile": "embedded"}
        settings = {**settings, **_take_fields(keys)}
        for name, value in settings.items():
            section, _, field = name.partition(".")
            content.setdefault(section, {})[field] = value
        file = self.folder / "RUN.yaml"
        file.write_text(yaml.safe_dump({**content, **keys}, allow_unicode=True, sort_keys=False))
        return read_launch_file(file, TIMEOUT_S)

    def say_in_form(self, settings, **keys):
        parameters = {"environment": ENVIRONMENT, "profile": "embedded", **keys}
        if settings:
            parameters["settings"] = format_settings(settings)
        return read_spec(LaunchSpec, json.loads(json.dumps(parameters)))

    def say_in_schedule(self, settings, **keys):
        """A schedule has the parameters of a former run, as Prefect shows them."""
        former = read_spec(
            LaunchSpec,
            {"environment": ENVIRONMENT, "profile": "embedded", "settings": settings, **keys},
        )
        return read_spec(LaunchSpec, json.loads(json.dumps(former.to_parameters())))

    def say_by_tool(self, settings, **keys):
        context = CallContext(AgentSession("test"))

        def ask(tool, **arguments):
            return TOOLS[tool].run_safely(context, json.loads(json.dumps(arguments)))[0]

        return self._edit_and_start(ask, settings, keys)

    def say_by_http(self, settings, **keys):
        def ask(tool, **arguments):
            name = arguments.pop("name", "")
            path = {
                "rl_select_environment": f"/environments/{name}/select",
                "rl_edit_config": "/config",
                "rl_start_training": "/runs",
            }[tool]
            return self.client.post(path, json=arguments).json()

        return self._edit_and_start(ask, settings, keys)

    def _edit_and_start(self, ask, settings, keys):
        ask("rl_select_environment", name=ENVIRONMENT, profile="embedded")
        for name, value in {**settings, **_take_fields(keys)}.items():
            answer = ask("rl_edit_config", field=name, value=value)
            if "error" in answer:
                raise ToolRefusal(answer["code"], answer["error"])
        self.handed_on.clear()
        answer = ask("rl_start_training", **keys)
        if not self.handed_on:
            raise ToolRefusal(answer["code"], answer["error"])
        return self.handed_on[0]


class ToolRefusal(Exception):
    """Hold the error that a tool has answered."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _take_fields(keys):
    """Take the keys that are fields where there is no key for them."""
    return {field: keys.pop(key) for key, field in FIELDS_OF_KEYS.items() if key in keys}


def _to_text(value):
    return value if isinstance(value, str) else json.dumps(value)


def outcome_of(say, settings, keys):
    """Return the resolved spec as JSON; or the code of the refusal, what it is about and what it
    allows, without the value in it, which is text at some surfaces.
    """
    try:
        spec = resolve_launch(say(settings, **keys), RunStore(), TIMEOUT_S).spec
    except (LachesisError, ToolRefusal) as error:
        subject, _, rest = str(error).partition(" is ")
        return str(error.code), subject.rpartition(": ")[2], rest.rpartition("; allowed: ")[2]
    return spec.model_copy(update={"by_agent": False}).model_dump_json()


def _make_values(field):
    """Return values for a field, most of them allowed."""
    strategies, alternatives = [], field.schema.get("anyOf") or [field.schema]
    for schema in alternatives:
        low, high = schema.get("minimum", 0), min(schema.get("maximum", 64), 10**6)
        match "enum" if "enum" in schema else schema.get("type"):
            case "enum":
                strategies.append(st.sampled_from(schema["enum"]))
            case "integer":
                strategies.append(st.integers(int(low), max(int(low), int(high))))
            case "number":
                strategies.append(st.floats(max(low, 1e-6), max(high, 1.0), allow_nan=False))
            case "boolean":
                strategies.append(st.booleans())
            case "string":
                strategies.append(TEXTS.filter(lambda text: text == text.strip()))
            case "array":
                strategies.append(st.lists(st.sampled_from(["<end>", "no", "5"]), max_size=2))
            case "null":
                strategies.append(st.none())
    takes_text = any(schema.get("type") == "string" for schema in alternatives)
    # Where a text is allowed, a number that is typed on a command line is one.
    wrong = ["many"] if takes_text else ["many", -7, 0.5]
    return st.one_of(*strategies, st.sampled_from(wrong))


@pytest.fixture(scope="module")
def fields():
    """The fields that an agent may edit too, in the order of a launch file."""
    schema = load_schema(find_environment(ENVIRONMENT), TIMEOUT_S)
    by_name = ConfigFields("embedded", schema).by_name
    return {
        name: field
        for name, field in sorted(by_name.items(), key=lambda item: _get_place(item[1]))
        if field.section in EDITED_SECTIONS and field.lock_reason is None and name not in LEFT_OUT
    }


def _get_place(field):
    return [*EDITED_SECTIONS, field.section].index(field.section)


@pytest.fixture
def surfaces(tmp_path, clean_environment, monkeypatch):
    return Surfaces(tmp_path, monkeypatch)


@pytest.mark.timeout(600)
def test_settings_mean_the_same_at_every_surface(surfaces, fields):
    assert len(fields) > 40

    @examples(st.data(), count=60)
    def check(data):
        chosen = data.draw(st.sets(st.sampled_from(list(fields)), max_size=3))
        settings = {
            name: data.draw(_make_values(fields[name])) for name in fields if name in chosen
        }
        keys = data.draw(
            st.fixed_dictionaries(
                {}, optional={"steps": st.integers(1, 10**6), "seed": st.integers(0, 10**6)}
            )
        )
        for key, field in FIELDS_OF_KEYS.items():
            if field in settings:  # Said once.
                keys.pop(key, None)
        outcomes = {
            name: outcome_of(getattr(surfaces, name), settings, keys)
            for name in dir(surfaces)
            if name.startswith("say_")
        }
        assert len(set(outcomes.values())) == 1, "\n".join(map(str, outcomes.items()))

    check()


@pytest.mark.timeout(600)
def test_what_the_owner_says_of_a_run_means_the_same_in_command_file_and_form(surfaces):
    keys = st.fixed_dictionaries(
        {},
        optional={
            "name": TEXTS,
            "note": TEXTS,
            "tags": st.lists(st.sampled_from(["night", "a/b", "b", "no tag"]), max_size=3),
            "steps": st.integers(1, 10**6),
        },
    )

    @examples(keys, count=60)
    def check(keys):
        outcomes = {
            say.__name__: outcome_of(say, {}, keys)
            for say in (
                surfaces.say_in_command,
                surfaces.say_in_file,
                surfaces.say_in_form,
                surfaces.say_in_schedule,
            )
        }
        assert len(set(outcomes.values())) == 1, "\n".join(map(str, outcomes.items()))

    check()
