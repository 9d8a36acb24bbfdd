"""Run an environment file in this process, which is a child made for it.

    run FILE serve --config YAML          like `python FILE serve --config YAML`, with the patches
                                          of `lachesis.environment_process.atropos_patches`
    inference-test FILE SPEC process --config YAML run an inference test; see
                                          `lachesis.environment_process.inference_test`
    check FILE CLASS OUT --config YAML    run the stages of a validation that need no model; see
                                          `lachesis.environment_process.model_free_check`
    describe FILE CLASS OUT               write the configuration's schema as JSON to OUT
    examples FILE CLASS OUT               make conversations for warming up a model; see
                                          `lachesis.environment_process.pretraining_examples`

`describe` and `examples` read a request in JSON with the file's `source` from the standard input.
LACHESIS_TEMPLATE_SETTINGS has what the run sets for its chat template, as JSON; see
`lachesis.environment_process.chat_template_settings`.
With LACHESIS_INFERENCE_URL and LACHESIS_INFERENCE_TOKEN, requests to that server carry the token.
With LACHESIS_COUNTERS_FILE, `run` writes counts of the environment's work to that file; see
`lachesis.environment_process.rollout_counters`. With LACHESIS_POSITION_FILE=FILE and
LACHESIS_TRAINED_GROUPS=N it continues where training is; see
`lachesis.environment_process.dataset_position`. With LACHESIS_EVALUATION_FOLDER it evaluates
held-out items when the trainer asks for it; see
`lachesis.environment_process.requested_evaluations`. With LACHESIS_ENVIRONMENT its groups carry
that name, if several environments feed a run.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lachesis.base.errors import RLEnvironmentError
from lachesis.base.files import give_content, read_cached
from lachesis.base.json_text import Json
from lachesis.base.managed_process import end_with_parent
from lachesis.base.secrets import redact
from lachesis.environment_catalog import fingerprint, requirements
from lachesis.environment_process import (
    atropos_patches,
    dataset_position,
    evaluation_recorder,
    event_loop_watch,
    group_labels,
    inference_test,
    lazy_imports,
    model_free_check,
    request_counters,
    requested_evaluations,
)
from lachesis.environment_process.chat_template_settings import (
    install_template_settings,
    read_template_settings,
)
from lachesis.environment_process.rollout_counters import RolloutCounters, install_rollout_counters
from lachesis.environment_toolkit.failure_reasons import describe_exception, list_causes
from lachesis.models.transformers_import import pause_garbage_collection

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv


def main() -> None:
    """Run the command that the arguments name."""
    end_with_parent(signal.SIGKILL)  # Even in the middle of an import.
    command, file = sys.argv[1], Path(sys.argv[2]).resolve()
    handler = {"describe": _describe_class, "examples": _make_examples}.get(command)
    if handler:
        request = json.loads(sys.stdin.read())
        give_content(file, request.pop("source").encode("latin-1"))
    sys.path[:] = fingerprint.build_search_path(file, sys.path)
    lazy_imports.load_when_used("torch", "wandb")
    if handler:
        answer = functools.partial(handler, file, request, class_name=sys.argv[3])
        write_answer(file, answer, out=Path(sys.argv[4]))
        return
    with pause_garbage_collection():
        atropos_patches.apply_atropos_patches()
    template_settings = read_template_settings()
    if command == "check":
        install_template_settings(template_settings, None)
        model_free_check.run_stages(
            file, class_name=sys.argv[3], out=Path(sys.argv[4]), config=Path(sys.argv[6])
        )
    else:
        _run_environment_file(command, file, sys.argv[3:], template_settings)


def _prepare_training(file: Path, inference_server: tuple[str, str] | None) -> None:
    """Install what an environment needs that makes rollouts for a run."""
    name = os.environ.get("LACHESIS_ENVIRONMENT", "")
    if name:
        atropos_patches.label_groups(name)
    counters_file = Path(os.environ["LACHESIS_COUNTERS_FILE"])
    rollout_counters = RolloutCounters(counters_file)
    watch = event_loop_watch.LoopWatch(
        rollout_counters, counters_file.with_suffix(".stack"), file.parent
    )
    evaluation_client, evaluation_folder = None, os.environ.get("LACHESIS_EVALUATION_FOLDER")
    if inference_server and evaluation_folder:
        evaluation_client = requested_evaluations.EvaluationClient(
            *inference_server, name, Path(evaluation_folder), watch.count_evaluation
        )
    _instrument_environment(rollout_counters, watch, evaluation_client)


def _run_environment_file(
    command: str, file: Path, options: list[str], template_settings: Json
) -> None:
    """Run the file as a program with its own command line."""
    rollout_counters = None
    inference_server = atropos_patches.install_inference_token()
    install_template_settings(template_settings, inference_server)
    if command == "run" and inference_server:
        evaluation_recorder.install_evaluation_hooks()
    if command == "inference-test":
        rollout_counters = inference_test.install_inference_test(
            json.loads(Path(options.pop(0)).read_text())
        )
    elif os.environ.get("LACHESIS_COUNTERS_FILE"):
        _prepare_training(file, inference_server)
    sys.argv = [str(file), *options]
    try:
        module = fingerprint.get_module_name(file)
        if module is None:
            _run_as_program(file)
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as error:
        traceback.print_exc()
        # Error messages show the line of a log that begins with an error code.
        print(
            f"{RLEnvironmentError.code}: {_describe_causes(error, file)}",
            file=sys.stderr,
            flush=True,
        )
        if rollout_counters is not None:
            inference_test.record_failure_kind(rollout_counters, error)
        sys.exit(1)


def _run_as_program(file: Path) -> None:
    """Run a file as Python runs a script; `runpy.run_path` would open it three times."""
    module = types.ModuleType("__main__")
    module.__file__ = str(file)
    sys.modules["__main__"] = module
    code = compile(read_cached(file), str(file), "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _describe_causes(error: Exception, file: Path) -> str:
    """Return the exception, what caused it, and what to do about a missing package, on one line."""
    causes = [describe_exception(error, str(file))]
    for cause in list_causes(error)[1:]:
        message = redact(str(cause))[:500]
        if message not in causes[0]:
            causes.append(f"{type(cause).__name__}: {message}")
    advice = filter(None, [requirements.get_import_advice(file, error)])
    return " ".join("; ".join(["; because of ".join(causes), *advice]).split())


def _instrument_environment(
    rollout_counters: RolloutCounters,
    watch: event_loop_watch.LoopWatch,
    evaluation_client: requested_evaluations.EvaluationClient | None,
) -> None:
    """Count what the environment's class does, track its position, and let it evaluate."""
    from atroposlib.envs.base import BaseEnv

    original_cli = BaseEnv.cli.__func__
    request_counters.install_request_counters(rollout_counters)
    start_position = dataset_position.DatasetPosition(
        Path(os.environ["LACHESIS_POSITION_FILE"]), int(os.environ["LACHESIS_TRAINED_GROUPS"])
    )

    def cli(cls: type[BaseEnv]) -> None:
        """Install what a run needs into an environment's class, and run its command line."""
        group_labels.label_groups_with_items(cls)
        dataset_position.install_position_tracking(start_position, cls)
        rollout_counters.num_items_before = start_position.items_to_skip
        install_rollout_counters(rollout_counters, cls)
        if evaluation_client is not None:
            evaluation_client.install_schedule(cls)
        watch.install(cls)
        original_cli(cls)

    BaseEnv.cli = classmethod(cli)


def write_answer(file: Path, answer: Callable[[], Json], *, out: Path) -> None:
    """Import the file, and write what `answer` returns or the error."""
    try:
        result = answer()
    except BaseException as error:  # An environment may raise SystemExit while it is imported.
        reason = describe_exception(error, str(file))
        result = {"error": reason, "traceback": traceback.format_exc()}
        result["advice"] = requirements.get_import_advice(file, error)
    temporary = out.with_suffix(".part")
    temporary.write_text(json.dumps(result))
    os.replace(temporary, out)
    sys.stdout.flush()
    os._exit(0)  # Threads that the environment has started must not keep the child alive.


def _describe_class(file: Path, request: dict[str, Any], *, class_name: str) -> dict[str, Any]:
    """Return the schema and the default values of a class's configuration."""
    cls = model_free_check.load_environment_class(file, class_name)
    return _describe_configuration(cls, request.get("values", {}))


def _make_examples(file: Path, request: dict[str, Any], *, class_name: str) -> dict[str, Any]:
    from lachesis.environment_process import pretraining_examples

    return {"examples": pretraining_examples.make_warmup_examples(file, class_name, request)}


def _describe_configuration(cls: type[BaseEnv], values: dict[str, Any]) -> dict[str, Any]:
    """Return the schema, defaults and warning of a configuration, and the refused values."""
    from atroposlib.envs.base import BaseEnvConfig
    from pydantic import BaseModel, ValidationError

    warning = None
    try:
        config = cls.config_init()[0]
        assert isinstance(config, BaseModel)
    except Exception as error:
        config, warning = (
            BaseEnvConfig(),
            f"config_init() failed, so these are Atropos' general fields: {error!r}",
        )
    schema = type(config).model_json_schema()
    errors: list[dict[str, str]] = []
    if values:
        try:
            type(config)(**{**config.model_dump(), **values})
        except ValidationError as error:
            errors = [_describe_validation_error(error_detail) for error_detail in error.errors()]
    description = {
        "properties": schema.get("properties", {}),
        "definitions": schema.get("$defs", {}),
        "values": config.model_dump(mode="json"),
        "checks": _has_validator_functions(type(config).__pydantic_core_schema__),
        "warning": warning,
    }
    return {"schema": description, "errors": errors}


def _describe_validation_error(error: Any) -> dict[str, str]:
    """Return the message of an error, and the field that is wrong by itself or an empty text."""
    field_path, message = (
        ".".join(map(str, error["loc"])),
        error["msg"].removeprefix("Value error, "),
    )
    return {
        "field": field_path,
        "message": f"{field_path} is {repr(error['input'])[:200]}: {message}"
        if field_path
        else message,
    }


def _has_validator_functions(core_schema: Any) -> bool:
    """Return whether the core schema calls Python code, which no JSON schema expresses."""
    if isinstance(core_schema, dict):
        kind = core_schema.get("type")
        if isinstance(kind, str) and kind.startswith("function-"):
            return True
        return any(
            _has_validator_functions(value)
            for key, value in core_schema.items()
            if key not in ("serialization", "metadata")
        )
    return isinstance(core_schema, list | tuple) and any(map(_has_validator_functions, core_schema))


if __name__ == "__main__":
    main()
