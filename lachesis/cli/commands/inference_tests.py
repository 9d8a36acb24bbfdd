"""Run `test`: start an inference test, wait for its end, and show its result."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base.argparse_types import GROUP_SIZE, NUM_GROUPS
from lachesis.base.errors import ModelNotFoundError
from lachesis.base.formatting import format_dollars
from lachesis.base.json_text import Json
from lachesis.cli import terminal
from lachesis.cli.commands.train import prepare_model, show_warnings
from lachesis.cli.options import (
    DEFAULT_PROFILE,
    Edits,
    EnvironmentName,
    Output,
    Profile,
    ServeOptions,
    number,
    options_class,
)
from lachesis.cli.terminal import TONE_STYLES, make_pairs_table, print_answer
from lachesis.config.launch_spec import LaunchSpec, TestSpec, parse_assignment, read_spec
from lachesis.config.run_config import RunConfig, check_template_settings
from lachesis.environment_catalog.scan import Environment
from lachesis.operations.environments import ServiceGroup, StageChild
from lachesis.operations.inference_tests import (
    EMBEDDED,
    TINKER,
    InferenceTest,
    check_test,
    get_model_name,
    get_test,
    open_tests,
    start_test,
)
from lachesis.operations.launches import build_tiny_model, read_fields, require_loadable_model
from lachesis.operations.server import call_with_server
from lachesis.reporting.inference_test_view import InferenceTestView, TestedModelView
from lachesis.reporting.run_view import describe_forecast
from lachesis.runs.store import RunStore


@options_class
class TestCommandOptions(ServeOptions):
    """Options of `lachesis test`, and the environment."""

    environment: Annotated[str, Parameter(parse=False)] = ""
    model: Annotated[
        tuple[str, ...],
        Parameter(
            help="as for `train`: a Hugging Face name, a folder or tiny; on profiles tinker and "
            "custom a name from `lachesis model list`; may be repeated"
        ),
    ] = ()
    endpoint_model: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="NAME", help="a name at $OPENAI_BASE_URL, or at OpenRouter; may be repeated"
        ),
    ] = ()
    steps: Annotated[int, number(NUM_GROUPS, "groups per model", default=3)] = 3
    group_size: Annotated[int, number(GROUP_SIZE, "completions per item", default=16)] = 16
    prompt: Annotated[
        tuple[str, ...],
        Parameter(help="a prompt of your own, instead of the environment's items; may be repeated"),
    ] = ()
    show_prompt: Annotated[
        bool,
        Parameter(
            help="print the prompt of the first item as text and as token ids, without sampling"
        ),
    ] = False
    edits: Edits = ()
    profile: Profile = DEFAULT_PROFILE


def run_test(
    environment: EnvironmentName, /, *, options: TestCommandOptions = TestCommandOptions()
) -> int:
    """Run an inference test and wait for its end; Ctrl-C leaves the test running."""
    options = replace(options, environment=environment)
    store, spec = RunStore(), read_test_spec(options)
    if options.show_prompt:
        return show_prompt(options, store, spec.to_launch())
    try:
        resolved = call_with_server(
            lambda: check_test(store, spec),
            terminal.print_note,
            is_forbidden=options.no_serve,
            home=store.home,
        )
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{error}; a model at an endpoint is named with --endpoint-model NAME"
        ) from error
    show_warnings(resolved.launch)
    if resolved.max_cost_usd is not None:
        terminal.print_note(f"the test costs at most {format_dollars(resolved.max_cost_usd)}")
    prepare_model(options, store, resolved.launch)
    test = _wait_for_test(options, store, start_test(store, resolved))
    print_answer(
        options,
        test.model_dump(mode="json"),
        render_test(InferenceTestView(test, open_tests(store))),
    )
    if (test.result or {}).get("summary", {}).get("environment_working"):
        return 0
    return 1


def read_test_spec(options: TestCommandOptions) -> TestSpec:
    """Return the test that the options describe."""
    prompt_options = {"max_tokens": 256, "temperature": 1.0} if options.prompt else {}
    values = {
        "environment": options.environment,
        "profile": options.profile,
        "model": find_trained_model(options),
        "settings": dict(parse_assignment(text) for text in options.edits),
        "steps": options.steps,
        "group_size": options.group_size,
        "models": list_tested_models(options),
        "prompts": list(options.prompt) or None,
        **prompt_options,
    }
    return read_spec(TestSpec, values)


def _wait_for_test(options: Output, store: RunStore, test: InferenceTest) -> InferenceTest:
    """Show the progress of a test until it has ended, and return it."""
    terminal.print_note(f"test {test.test_id}: {open_tests(store).dir(test.test_id)}")
    num_groups = test.request.spec.num_groups * len(test.request.models)
    with terminal.show_progress_bar("groups", quiet=options.json) as advance:
        while not (test := get_test(store, test.test_id)).has_ended:
            advance(open_tests(store).count_finished_groups(test), num_groups)
            time.sleep(0.5)
    return test


def find_trained_model(options: TestCommandOptions) -> str | None:
    """Return the value of `train --model` that corresponds to a test's only --model, or None."""
    names = [_expand_model_path(name) for name in options.model]
    if len(names) == 1 and _is_trainable(options, options.model[0]):
        return names[0]
    return None


def list_tested_models(options: TestCommandOptions) -> list[str] | None:
    """Return the models of a test as the service names them, or None for the default."""
    names = [f"{_find_place(options, name)}{_expand_model_path(name)}" for name in options.model]
    return [*names, *options.endpoint_model] or None


def _is_local_model(options: TestCommandOptions, name: str) -> bool:
    """Return whether the embedded engine serves the model of a test's --model."""
    return options.profile == "embedded" or name.startswith(EMBEDDED) or Path(name).is_dir()


def _find_place(options: TestCommandOptions, name: str) -> str:
    """Return the prefix that says where a test's --model is sampled."""
    if _is_local_model(options, name):
        return EMBEDDED
    return TINKER


def _is_trainable(options: TestCommandOptions, name: str) -> bool:
    """Return whether the profile trains the model where the test samples it."""
    return options.profile == "embedded" or not _is_local_model(options, name)


def _expand_model_path(name: str) -> str:
    """Return the absolute path of a model folder; any other name is returned unchanged."""
    name = get_model_name(name)
    if Path(name).is_dir():
        return str(Path(name).resolve())
    return name


SHOWN_STAGES = ("import", "config", "dataset", "model-free check")
_STAGE_MARKS = {"passed": "ok", "failed": "FAILED"}


def render_test(view: InferenceTestView) -> RenderableType:
    """Return the result per model, the answers to prompts, and the next step."""
    if view.test.result is None:
        return Text(f"the test failed: {view.test.error}", style="red")
    stages = " · ".join(
        f"{stage.name} {_STAGE_MARKS.get(stage.status, stage.status)}"
        for stage in view.test.stages
        if stage.name in SHOWN_STAGES
    )
    rows: list[tuple[str, str | Text]] = [("stages", Text(stages, style="dim"))]
    for model in view.models:
        rows.append((model.name, _describe_model(model)))
        rows += [("", line) for line in (*model.evidence, *model.answered_prompts)]
    if view.forecast is not None:
        rows.append(("forecast", describe_forecast(view.forecast)))
    if view.cost_usd is not None:
        rows.append(("cost", f"{format_dollars(view.cost_usd)} for this test"))
    rows.append(("files", Text(str(view.store.dir(view.test.test_id)), style="dim")))
    train, again = (f"`{command}`" for command in view.commands[:2])
    rows.append(("next", view.describe_next_step(train, again)))
    return make_pairs_table(rows)


def _describe_model(model: TestedModelView) -> Text:
    """Return the verdict of one model with its numbers, and its error."""
    text = Text()
    text.append(model.mark.word, style=TONE_STYLES[model.mark.tone])
    if model.summary:
        text.append(f"\n{model.summary}")
    if model.error:
        text.append(f"\n{model.error}", style="red")
    return text


def show_prompt(options: Output, store: RunStore, spec: LaunchSpec) -> int:
    """Render the prompt of the first item with the model's own tokenizer, and print it.

    Raises:
        LachesisError: The environment or the model's tokenizer cannot be loaded.
    """
    launch_fields = read_fields(spec)
    config = launch_fields.build_config(store.home)
    # Nothing is sampled, so the tokenizer is enough.
    require_loadable_model(config.openai.model_name, store.home, profile="tinker")
    build_tiny_model(store, config, lambda done, total: None)
    check_template_settings(config)
    environment = launch_fields.environment
    prompt = _render_prompt(environment, config)
    answer = {"environment": environment.name, "model": config.openai.model_name, "prompt": prompt}
    if prompt is None:
        text = (
            f"{environment.name} makes its prompts itself, so they are known only when it samples; "
            f"`lachesis test {environment.name}` keeps those of its first groups"
        )
        print_answer(options, answer, text)
        return 1
    facts = make_pairs_table(
        [
            ("environment", environment.name),
            ("model", config.openai.model_name),
            ("tokens", str(len(prompt["tokens"]))),
        ]
    )
    ids = " ".join(map(str, prompt["tokens"]))
    print_answer(options, answer, Group(facts, Text(), Text(prompt["text"]), Text(), Text(ids)))
    return 0


def _render_prompt(environment: Environment, config: RunConfig) -> Json | None:
    """Return the first item's prompt as text and token ids, or None without such a method."""
    detail: Json = {}
    with tempfile.TemporaryDirectory() as folder, ServiceGroup() as group:
        child = StageChild(
            group, environment.file_path, environment.class_name, config, Path(folder)
        )
        for stage in ("import", "config", "dataset"):
            detail = child.wait_for_stage(stage).get("detail") or {}
    return detail.get("prompt")
