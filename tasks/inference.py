"""One model of an inference test: serve it when it is local, and run the environment's `process` command against it."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from lachesis import config as configuration
from lachesis.config import RunConfig
from lachesis.errors import LachesisError
from lachesis.inference_tests import (
    EMBEDDED,
    InferenceTest,
    InferenceTests,
    model_result,
    probe_config,
    remote_endpoint,
)
from lachesis.runs import write_private
from lachesis.supervision.group import ServiceGroup
from lachesis.supervision.health import wait_healthy
from lachesis.supervision.plan import make_base_server, make_probe
from tasks.processes import await_end, build_tiny_model, is_missing_tiny_model

Json = dict[str, Any]


@task(task_run_name="test {model}", cache_policy=NO_CACHE)
def test_model(tests: InferenceTests, test: InferenceTest, config: RunConfig, model: str, lock: int) -> Json:
    """The contract's entry of one model. What goes wrong with the model or the environment is its `error`. `lock` is held while
    one of its processes lives."""
    run = f"test_inference_RSIAgent_{test.request.environment}_{secrets.token_hex(4)}"
    output = tests.output(test, model)
    error, key = None, ""
    with ServiceGroup(hold=(lock,)) as group:
        try:
            config, endpoint, key = _endpoint(group, tests.home, output, config, model)
            _probe(group, test, output, probe_config(config, test.request, output, endpoint, run), run, key)
        except LachesisError as problem:
            error = _without(key, str(problem))
    _scrub(output.with_suffix(".log"), key)
    result = model_result(output, model, run, error=error, prompts=bool(test.request.prompts))
    if not error and result["steps_tested"] < test.request.num_steps:
        result["error"] = f"{result['steps_tested']} groups came of those asked for, see {result['log_file']}"
    return result


test_model.__test__ = False  # type: ignore[attr-defined]  # no test of pytest


def _endpoint(group: ServiceGroup, home: Path, output: Path, config: RunConfig, model: str) -> tuple[RunConfig, Json, str]:
    """Where the model answers, and the key it asks for. A local one is served here as long as the group lasts."""
    name = model.removeprefix(EMBEDDED) if model.startswith(EMBEDDED) else config.openai.model_name
    folder = output.with_suffix("")
    folder.mkdir(exist_ok=True)
    if is_missing_tiny_model(name, home):  # at an endpoint its tokenizer is needed
        build_tiny_model(home, folder)
    if not model.startswith(EMBEDDED):
        return config, *remote_endpoint(model)
    values = config.model_dump()
    values["env"]["tokenizer_name"] = values["openai"]["model_name"] = name
    plan = make_base_server(configuration.build(values), folder)
    plan.write()
    for spec in plan.services:
        group.start(spec)
        wait_healthy(group, spec)
    return plan.config, plan.config.openai.model_dump(mode="json"), ""


def _probe(group: ServiceGroup, test: InferenceTest, output: Path, config_yaml: str, wandb_run: str, key: str) -> None:
    request = test.request
    wanted: Json = {"out": str(output), "prompts": request.prompts, "wandb_run": wandb_run}
    if request.prompts:
        wanted |= {"max_tokens": request.max_tokens, "temperature": request.temperature}
    probe, files = make_probe(request.environment_file, config_yaml, output, wanted, key=key)
    for path, text in files.items():
        write_private(path, text)
    group.start(probe)
    await_end(group, probe, needs=[])  # no task: its error, with the end of a log, would stand in Prefect's database


def _without(key: str, text: str) -> str:
    return text.replace(key, "***") if key else text


def _scrub(log: Path, key: str) -> None:
    """An endpoint may echo the key in its complaint, and an environment may print what it was given."""
    if key and log.is_file() and key.encode() in (content := log.read_bytes()):
        log.write_bytes(content.replace(key.encode(), b"***"))
