"""Run an environment file in this process, which is a child made for it.

    run FILE serve --config YAML          as `python FILE serve --config YAML`, with a few things mended; see
                                          `lachesis.env_process.atropos_patches`
    probe FILE SPEC process --config YAML the same for an inference test; see `lachesis.env_process.inference_test`
    check FILE CLASS OUT --config YAML    the stages of a validation that need no model; see `lachesis.env_process.stages`
    describe FILE CLASS OUT               the configuration's schema as JSON to OUT
    examples FILE CLASS OUT               conversations to warm a model up with; see `lachesis.env_process.warmup_examples`

With LACHESIS_INFERENCE_URL and _TOKEN, requests to the server at that address carry the token.
With LACHESIS_TALLY, `run` writes what the environment does and waits for to that file; see
`lachesis.env_process.counters`. With LACHESIS_CURSOR=FILE and LACHESIS_CURSOR_GROUPS=N it goes on from
where training stands; see `lachesis.env_process.position`. With LACHESIS_ENVIRONMENT its groups carry
that name, where several environments feed a run.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lachesis.base.secrets import redact
from lachesis.catalog import fingerprint, requirements
from lachesis.env_process import atropos_patches, counters, inference_test, lazy_modules, position, scheduled_evaluation, stages
from lachesis.environment.endpoint_errors import list_causes


def main() -> None:
    command, file = sys.argv[1], Path(sys.argv[2]).resolve()
    sys.path[:] = fingerprint.build_search_path(file, sys.path)
    lazy_modules.load_when_used("torch", "wandb")
    if question := {"describe": _described, "examples": _examples}.get(command):
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        answer(file, functools.partial(question, class_name=sys.argv[3]), out=Path(sys.argv[4]))
    elif command == "check":
        atropos_patches.mend()
        stages.run(file, class_name=sys.argv[3], out=Path(sys.argv[4]), config=Path(sys.argv[6]))
    else:
        atropos_patches.mend()
        _run(command, file, sys.argv[3:])


def _run(command: str, file: Path, options: list[str]) -> None:
    """The file as a program, with its own command line."""
    counted = None
    server = atropos_patches.send_token()
    if command == "run" and server:
        scheduled_evaluation.install(server[0])
    if command == "probe":
        counted = inference_test.install(json.loads(Path(options.pop(0)).read_text()))
    elif os.environ.get("LACHESIS_TALLY"):
        name = os.environ.get("LACHESIS_ENVIRONMENT", "")
        if name:
            atropos_patches.sign_groups(name)
        trainer = scheduled_evaluation.Trainer(*server, name) if server else None
        _count(Path(os.environ["LACHESIS_TALLY"]), Path(os.environ["LACHESIS_CURSOR"]), trainer)
    sys.argv = [str(file), *options]
    try:
        module = fingerprint.get_module_name(file)
        if module is None:
            runpy.run_path(str(file), run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as error:
        traceback.print_exc()
        causes = [f"{type(one).__name__}: {redact(str(one))[:500]}" for one in list_causes(error)]
        causes += filter(None, [requirements.get_import_advice(file, error)])
        print("\nbecause of ".join(causes), file=sys.stderr, flush=True)  # the last lines are what is shown of a log
        if counted is not None:
            inference_test.note_failure(counted, error)
        sys.exit(1)


def _count(file: Path, place: Path, trainer: scheduled_evaluation.Trainer | None) -> None:
    """Count what the environment's class does, whichever it is, keep its place in its items, and evaluate it when the trainer
    asks for it."""
    from atroposlib.envs.base import BaseEnv

    start = BaseEnv.cli.__func__
    counts = counters.Tally(file, beat=True)
    counters.watch_servers(counts)
    reached = position.Cursor(place, int(os.environ["LACHESIS_CURSOR_GROUPS"]))

    def cli(cls: Any) -> None:
        position.watch(reached, cls)
        counters.watch_environment(counts, cls)
        if trainer is not None:
            trainer.watch(cls)
        start(cls)

    BaseEnv.cli = classmethod(cli)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, as nobody waits for what it says; also in the middle of an import."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def answer(file: Path, question: Callable[[Path, dict[str, Any]], dict[str, Any]], *, out: Path) -> None:
    """Import the file and write what it says to the question, which came on the standard input, or why it says nothing."""
    try:
        found = question(file, json.loads(sys.stdin.read() or "{}"))
    except BaseException as error:  # an environment may raise SystemExit at import
        found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        found["advice"] = requirements.get_import_advice(file, error)
    temporary = out.with_suffix(".part")
    temporary.write_text(json.dumps(found))
    os.replace(temporary, out)
    sys.stdout.flush()
    os._exit(0)  # threads that the environment has started must not keep the child


def _described(file: Path, values: dict[str, Any], *, class_name: str) -> dict[str, Any]:
    return _configuration(stages.load(file, class_name), values)


def _examples(file: Path, request: dict[str, Any], *, class_name: str) -> dict[str, Any]:
    from lachesis.env_process import warmup_examples

    return {"examples": warmup_examples.make(file, class_name, request)}


def _configuration(cls: Any, values: dict[str, Any]) -> dict[str, Any]:
    from atroposlib.envs.base import BaseEnvConfig
    from pydantic import BaseModel, ValidationError

    warning = None
    try:
        config = cls.config_init()[0]
        assert isinstance(config, BaseModel)
    except Exception as error:
        config, warning = BaseEnvConfig(), f"config_init() failed, so these are Atropos' general fields: {error!r}"
    schema = type(config).model_json_schema()
    errors: list[dict[str, str]] = []
    if values:
        try:
            type(config)(**{**config.model_dump(), **values})
        except ValidationError as error:
            errors = [_complaint(one) for one in error.errors()]
    found = {
        "properties": schema.get("properties", {}),
        "definitions": schema.get("$defs", {}),
        "values": config.model_dump(mode="json"),
        "checks": _has_functions(type(config).__pydantic_core_schema__),
        "warning": warning,
    }
    return {"schema": found, "errors": errors}


def _complaint(error: Any) -> dict[str, str]:
    """The field that is wrong by itself, or "" for fields that do not fit together, and what is said of it."""
    place, said = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    return {"field": place, "message": f"{place} is {repr(error['input'])[:200]}: {said}" if place else said}


def _has_functions(core_schema: Any) -> bool:
    """Whether pydantic's core schema calls Python code to validate, which a JSON schema cannot say."""
    if isinstance(core_schema, dict):
        kind = core_schema.get("type")
        if isinstance(kind, str) and kind.startswith("function-"):
            return True
        return any(_has_functions(one) for key, one in core_schema.items() if key not in ("serialization", "metadata"))
    return isinstance(core_schema, list | tuple) and any(map(_has_functions, core_schema))


if __name__ == "__main__":
    main()
