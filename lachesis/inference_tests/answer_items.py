"""Let one model answer the items of a test by the environment's command `process`."""

import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from lachesis.base.errors import LachesisError, ServerDownError, StageError
from lachesis.base.files import write_private
from lachesis.base.json_text import Json
from lachesis.config.run_config import RunConfig
from lachesis.environment_check.stages import serve_base_model
from lachesis.inference_tests.results import collect_inference_counts
from lachesis.inference_tests.store import (
    EMBEDDED,
    TINKER,
    InferenceTest,
    InferenceTestStore,
    get_model_name,
)
from lachesis.inference_tests.verdict import Verdict, judge_learnability
from lachesis.runs.environment_counters import read_counts
from lachesis.supervision.readiness import wait_until_ended
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.services.inference_test import (
    find_endpoint,
    make_inference_test_spec,
    make_process_config,
    make_remote_server_section,
)

# Time limit from the moment that the model can be called.
MODEL_TIMEOUT_S = 600.0
# Pauses before an endpoint that could not be reached is called again.
RETRY_PAUSES_S = (2.0, 10.0)


@dataclass(frozen=True)
class TestContext:
    """Hold the objects that the steps of one test share.

    `lock_fd` is open while a process of the test is alive; `open_groups` are closed when the test
    is asked to end, because a signal reaches only the main thread.
    """

    __test__ = False  # pytest must not collect this class.

    tests: InferenceTestStore
    test: InferenceTest
    config: RunConfig
    lock_fd: int
    open_groups: list[ServiceGroup] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Return the folder of the test."""
        return self.tests.dir(self.test.test_id)

    def close_groups(self) -> None:
        """End the processes that the steps have started."""
        for group in self.open_groups:
            group.close()


def answer_items(context: TestContext, model: str, wandb_run: str) -> None:
    """Write the model's answers to its files; an endpoint that is away is called again.

    Raises:
        ServerDownError: The endpoint could not be reached.
        LachesisError: The test failed for another reason.
    """
    for pause_s in RETRY_PAUSES_S:
        try:
            return _answer_items_once(context, model, wandb_run)
        except ServerDownError:  # A fault of the environment would happen again.
            time.sleep(pause_s)
    return _answer_items_once(context, model, wandb_run)


def _answer_items_once(context: TestContext, model: str, wandb_run: str) -> None:
    """Let one model answer the items of a test once; what an earlier attempt wrote is removed."""
    files = context.tests.get_output_files(context.test, model)
    for old in files:
        # Beside files of an earlier attempt Atropos would write under another name.
        old.unlink(missing_ok=True)
    try:
        with ServiceGroup(inherited_fds=(context.lock_fd,)) as group:
            context.open_groups.append(group)
            config, endpoint, client_env = _prepare_endpoint(group, context, model)
            config_yaml = make_process_config(
                config,
                context.test.request.spec,
                files[0],
                endpoint,
                wandb_run,
                use_wandb="WANDB_API_KEY" in os.environ,
            )
            _run_process_command(group, context, model, config_yaml, wandb_run, client_env)
    except LachesisError as problem:
        if read_failure_kind(context.tests.get_counters_file(context.test, model)) == "transport":
            raise ServerDownError(f"the endpoint of {model} could not be used: {problem}") from None
        raise


def score_answers(context: TestContext, model: str, model_free: Json) -> Verdict:
    """Return the verdict on the model's answers.

    Raises:
        StageError: No score can be used.
    """
    output = context.tests.get_output_file(context.test, model)
    counts = collect_inference_counts(
        output, read_counts(context.tests.get_counters_file(context.test, model))
    )
    verdict = judge_learnability(counts, model_free=model_free)
    if not any(counts.scores_P):
        raise StageError("; ".join(verdict.evidence), stage="scoring")
    return verdict


def make_wandb_run_name(test: InferenceTest) -> str:
    """Return the name of a test's W&B run."""
    return f"test_inference_RSIAgent_{test.request.environment}_{secrets.token_hex(4)}"


def read_failure_kind(counters_file: Path) -> str | None:
    """Return whose fault the end of a test was: transport, endpoint or environment."""
    failure = (read_counts(counters_file) or {}).get("failure")
    if isinstance(failure, dict):
        return failure.get("kind")
    return None


def _prepare_endpoint(
    group: ServiceGroup, context: TestContext, model: str
) -> tuple[RunConfig, Json, dict[str, str]]:
    """Return where the model responds, and what its client needs in its environment.

    A model of this machine or of the Tinker server is served by an inference server like that of a
    run as long as the group lasts; any other model is at the endpoint.
    """
    config = context.config
    if not model.startswith((EMBEDDED, TINKER)):
        url, client_env = find_endpoint()
        return config, make_remote_server_section(model, url), client_env
    is_embedded = model.startswith(EMBEDDED)
    if is_embedded:
        config = config.without_backend()
    plan = serve_base_model(
        group,
        config,
        get_model_name(model),
        context.tests.get_output_file(context.test, model).with_suffix(""),
        with_engine=is_embedded or config.has_own_engine,
    )
    return plan.config, plan.config.openai.model_dump(mode="json"), plan.client_env


def _make_test_spec(context: TestContext, model: str, wandb_run_name: str) -> Json:
    """Return the description of a test for `lachesis.environment_process.inference_test`."""
    test, spec = context.test, context.test.request.spec
    test_spec: Json = {
        "output": str(context.tests.get_output_file(test, model)),
        "counters": str(context.tests.get_counters_file(test, model)),
        "samples": str(context.tests.get_samples_file(test, model)),
        "prompts": spec.prompts,
        "wandb_run": wandb_run_name,
    }
    if spec.prompts:
        test_spec |= {"max_tokens": spec.max_tokens, "temperature": spec.temperature}
    return test_spec


def _run_process_command(
    group: ServiceGroup,
    context: TestContext,
    model: str,
    config_yaml: str,
    wandb_run_name: str,
    client_env: dict[str, str],
) -> None:
    """Run Atropos' command `process` on the environment, and wait for its end."""
    service, files = make_inference_test_spec(
        context.test.request.environment_file,
        config_yaml,
        context.tests.get_output_file(context.test, model),
        _make_test_spec(context, model, wandb_run_name),
        client_env=client_env,
        timeout_s=MODEL_TIMEOUT_S,
    )
    for path, text in files.items():
        write_private(path, text)
    group.start(service)
    wait_until_ended(group, service, needs=[])
