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
from tasks.processes import build_tiny_model, is_missing_tiny_model, wait_for_end

Json = dict[str, Any]


@task(task_run_name="test {model}", cache_policy=NO_CACHE)
def test_model(tests: InferenceTests, test: InferenceTest, config: RunConfig, model: str) -> Json:
    """The contract's entry of one model. What goes wrong with the model or the environment is its `error`."""
    run = f"test_inference_RSIAgent_{test.request.environment}_{secrets.token_hex(4)}"
    output = tests.output(test, model)
    error = None
    with ServiceGroup() as group:
        try:
            config, endpoint, key = _endpoint(group, tests.home, output, config, model)
            _probe(group, test, output, probe_config(config, test.request, output, endpoint, run), run, key)
        except LachesisError as problem:
            error = str(problem)
    result = model_result(output, model, run, error=error, prompts=bool(test.request.prompts))
    if not error and result["steps_tested"] < test.request.num_steps:
        result["error"] = f"{result['steps_tested']} groups came of those asked for, see {result['log_file']}"
    return result


test_model.__test__ = False  # type: ignore[attr-defined]  # no test of pytest


def _endpoint(
    group: ServiceGroup, home: Path, output: Path, config: RunConfig, model: str
) -> tuple[RunConfig, Json, str | None]:
    """Where the model answers. A local one is served here as long as the group lasts."""
    if not model.startswith(EMBEDDED):
        section, key = remote_endpoint(model)
        return config, section, key
    name = model.removeprefix(EMBEDDED)
    folder = output.with_suffix("")
    folder.mkdir(exist_ok=True)
    if is_missing_tiny_model(name, home):
        build_tiny_model(home, folder)
    values = config.model_dump()
    values["env"]["tokenizer_name"] = values["openai"]["model_name"] = name
    plan = make_base_server(configuration.build(values), folder)
    plan.write()
    for spec in plan.services:
        group.start(spec)
        wait_healthy(group, spec)
    return plan.config, plan.config.openai.model_dump(mode="json"), None


def _probe(group: ServiceGroup, test: InferenceTest, output: Path, config_yaml: str, wandb_run: str, key: str | None) -> None:
    request = test.request
    wanted: Json = {"out": str(output), "prompts": request.prompts, "wandb_run": wandb_run}
    if request.prompts:
        wanted |= {"max_tokens": request.max_tokens, "temperature": request.temperature}
    probe, files = make_probe(request.environment_file, config_yaml, output, wanted, key=key)
    for path, text in files.items():
        write_private(path, text)
    group.start(probe)
    wait_for_end(group, probe, needs=[])
