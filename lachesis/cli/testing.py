"""Run `lachesis test`: start an inference test of an environment, and wait for its result."""

from __future__ import annotations

import argparse
import time

from lachesis.base.errors import ModelNotFoundError
from lachesis.cli import console, show_tests
from lachesis.cli.background_server import check_with_server
from lachesis.cli.console import print_answer
from lachesis.cli.show_prompt import show_prompt
from lachesis.cli.tested_models import find_trained_model, format_train_command, list_tested_models
from lachesis.cli.train import prepare_model, show_warnings
from lachesis.config.field_edits import parse_assignment
from lachesis.environment_catalog.lookup import register_environment
from lachesis.inference_tests.store import InferenceTest, TestOptions
from lachesis.operations.service import LachesisService, LaunchRequest


def handle_test(args: argparse.Namespace) -> int:
    """Run an inference test and wait for its end; Ctrl-C leaves the test running."""
    service, options = LachesisService(), _read_options(args)
    if args.show_prompt:
        return show_prompt(args, service, _read_launch(args))
    launch = _read_launch(args)
    try:
        resolved = check_with_server(args, service, lambda: service.check_test(launch, options))
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{error}; a model at an endpoint is named with --endpoint-model NAME"
        ) from error
    show_warnings(resolved.launch)
    if resolved.max_cost_usd is not None:
        console.print_note(f"the test costs at most {resolved.max_cost_usd:.2g} US dollars")
    prepare_model(args, service, resolved.launch)
    test = _wait_for_test(args, service, service.start_test(resolved, options))
    print_answer(
        args,
        test.model_dump(mode="json"),
        show_tests.render_test(test, format_train_command(args)),
    )
    if (test.result or {}).get("summary", {}).get("environment_working"):
        return 0
    return 1


def _read_launch(args: argparse.Namespace) -> LaunchRequest:
    return LaunchRequest(
        register_environment(args.environment),
        args.profile,
        tuple(parse_assignment(text) for text in args.edits),
        find_trained_model(args),
        by_owner=True,
    )


def _read_options(args: argparse.Namespace) -> TestOptions:
    prompt_options = {"max_tokens": 256, "temperature": 1.0} if args.prompt else {}
    return TestOptions(
        num_steps=args.steps,
        group_size=args.group_size,
        models=list_tested_models(args),
        prompts=args.prompt,
        **prompt_options,
    )


def _wait_for_test(
    args: argparse.Namespace, service: LachesisService, test: InferenceTest
) -> InferenceTest:
    """Show the progress of a test until it has ended, and return it."""
    console.print_note(f"test {test.test_id}: {service.tests.dir(test.test_id)}")
    num_groups = test.request.num_steps * len(test.request.models)
    with console.show_progress_bar("groups", quiet=args.json) as advance:
        while not (test := service.get_test(test.test_id)).has_ended:
            advance(service.tests.count_finished_groups(test), num_groups)
            time.sleep(0.5)
    return test
