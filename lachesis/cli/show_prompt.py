"""Show what a model is shown of an environment's first item, without sampling anything."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Group
from rich.text import Text

from lachesis.base.json_text import Json
from lachesis.cli.console import print_answer
from lachesis.cli.layout import make_pairs_table
from lachesis.config.run_config import RunConfig
from lachesis.config.template_kwargs import check_template_settings
from lachesis.environment_catalog.scan import Environment
from lachesis.environment_check.stages import StageChild
from lachesis.launch.choose_model import LaunchRequest, require_loadable_model
from lachesis.launch.resolved_launch import read_launch_fields
from lachesis.operations.service import LachesisService
from lachesis.supervision.running_services import ServiceGroup


def show_prompt(args: argparse.Namespace, service: LachesisService, request: LaunchRequest) -> int:
    """Render the prompt of the first item with the model's own tokenizer, and print it.

    Raises:
        LachesisError: The environment or the model's tokenizer cannot be loaded.
    """
    launch_fields = read_launch_fields(request, service.schema_timeout_s)
    config = launch_fields.build_config(service.store.home)
    # Nothing is sampled, so the tokenizer is enough.
    require_loadable_model(config.openai.model_name, service.store.home, profile="tinker")
    service.build_tiny_model(config, lambda done, total: None)
    check_template_settings(config)
    environment = launch_fields.environment
    prompt = _render_prompt(environment, config)
    answer = {"environment": environment.name, "model": config.openai.model_name, "prompt": prompt}
    if prompt is None:
        text = (
            f"{environment.name} makes its prompts itself, so they are known only when it samples; "
            f"`lachesis test {environment.name}` keeps those of its first groups"
        )
        print_answer(args, answer, text)
        return 1
    facts = make_pairs_table(
        [
            ("environment", environment.name),
            ("model", config.openai.model_name),
            ("tokens", str(len(prompt["tokens"]))),
        ]
    )
    ids = " ".join(map(str, prompt["tokens"]))
    print_answer(args, answer, Group(facts, Text(), Text(prompt["text"]), Text(), Text(ids)))
    return 0


def _render_prompt(environment: Environment, config: RunConfig) -> Json | None:
    """Return the text and the token ids of the first item, or None if the environment does not say
    what it shows.
    """
    detail: Json = {}
    with tempfile.TemporaryDirectory() as folder, ServiceGroup() as group:
        child = StageChild(
            group, environment.file_path, environment.class_name, config, Path(folder)
        )
        for stage in ("import", "config", "dataset"):
            detail = child.wait_for_stage(stage).get("detail") or {}
    return detail.get("prompt")
