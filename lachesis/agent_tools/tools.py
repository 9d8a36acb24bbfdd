"""Define every tool; all interfaces for agents are made from them.

The name, description and schemas of a tool come from its function. A tool that is called as a
function returns its answer as JSON text and never raises: `await rl_list_runs()`. The interfaces
use `AgentTool.run_safely`, which returns the answer as JSON and says whether it is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field

from lachesis.agent_tools import (
    environment_checks,
    health_check,
    inference_tests,
    run_reports,
    schemas,
)
from lachesis.agent_tools.draft import MAX_TEST_WAIT_S, AgentSession
from lachesis.agent_tools.health_check import (
    check_rl_api_keys,
    check_rl_python_version,
    get_missing_keys,
)
from lachesis.agent_tools.launches import (
    ask_for_confirmation,
    is_paid,
    must_confirm,
    preview_resume,
    preview_start,
)
from lachesis.agent_tools.tool_arguments import (
    AnsweringModel,
    Confirm,
    CreateFile,
    FromCheckpoint,
    IdempotencyKey,
    InstallRequirements,
    NewLimits,
    RequireValidation,
    ResumedRun,
    RolloutItem,
    RolloutOrder,
    RolloutStep,
    RunId,
    SelectedModel,
    SelectedProfile,
    TestedModels,
    TestPrompts,
)
from lachesis.agent_tools.tool_definition import (
    TOOLS,
    AgentTool,
    CallContext,
    ToolHints,
    run_catching_errors,
    tool,
)
from lachesis.base.errors import ArgumentsError
from lachesis.base.json_text import Json, to_compact_json
from lachesis.config.installation_settings import get_default_profile
from lachesis.operations.launches import ModelList, list_models
from lachesis.operations.runs import get_run
from lachesis.operations.server import call_with_server
from lachesis.reporting.run_schemas import RunResults

__all__ = [
    "TOOLS",
    "AgentTool",
    "CallContext",
    "Json",
    "check_rl_api_keys",
    "check_rl_python_version",
    "get_missing_keys",
    "run_catching_errors",
    "to_compact_json",
]
# Tools whose calls may take half a minute; a server must answer other calls meanwhile.
SLOW_TOOLS = ("rl_test_inference", "rl_check_environment")
# Seconds that a first start of a server takes, as an agent's client shows them.
USUAL_START_S = 20.0
Answer = TypeVar("Answer", schemas.StartAnswer, schemas.TestReport)
READ_ONLY_HINTS = ToolHints(read_only=True, idempotent=True)


@tool(READ_ONLY_HINTS)
def rl_list_environments(context: CallContext) -> schemas.EnvironmentList:
    """List the environments that can be trained on, with their names, classes, files and
    descriptions.
    """
    return context.session.list_environments()


@tool(ToolHints(read_only=True, idempotent=True, open_world=True))
def rl_list_models(context: CallContext, profile: SelectedProfile = None) -> ModelList:
    """List the models that can be trained, asked of the profile's server.

    Each has its context, prices, thinking, and a recommended rank and learning rate with their
    sources. Without `profile` it is that of the draft, or the default.
    """
    return list_session_models(context.session, profile)


@tool(ToolHints(idempotent=True))
def rl_select_environment(
    context: CallContext,
    name: Annotated[str, Field(max_length=200, description="A name from rl_list_environments")],
    profile: SelectedProfile = None,
    model: SelectedModel = None,
) -> schemas.SelectAnswer:
    """Select an environment and begin a new draft of its configuration with the default values.

    The draft is kept for this session, even if the agent restarts. The first look at an environment
    takes some seconds.
    """
    return context.session.select(name, profile, model)


@tool(READ_ONLY_HINTS)
def rl_get_current_config(context: CallContext) -> schemas.CurrentConfig:
    """Show every field of the selected environment.

    Editable fields have their types and values; locked fields have the reason.
    """
    return context.session.get_current_config()


@tool(ToolHints(idempotent=True))
def rl_edit_config(
    context: CallContext,
    field: Annotated[
        str,
        Field(
            max_length=200,
            description="A configurable field from rl_get_current_config, bare or as section.field",
        ),
    ],
    value: Annotated[Any, Field(description="The new value, of the field's type")],
) -> schemas.EditAnswer:
    """Set one field of the draft.

    A wrong type, a value out of range or a locked field is refused with what is allowed, and
    nothing changes.
    """
    return context.session.edit(field, value)


@tool(ToolHints(open_world=True))
def rl_start_training(
    context: CallContext,
    dry_run: Annotated[
        bool, Field(description="Only show the whole configuration, the services and their ports")
    ] = False,
    resume: ResumedRun = None,
    idempotency_key: IdempotencyKey = None,
    require_validation: RequireValidation = False,
    from_checkpoint: FromCheckpoint = None,
    limits: NewLimits = None,
    confirm: Confirm = False,
) -> schemas.StartAnswer:
    """Start a training run from the draft and return its run id at once; training continues without
    the agent.

    A call that may be repeated needs an `idempotency_key`: the same key returns the existing run.
    If the host is running its maximum number of runs, the run waits and `queue` has its place.
    """
    if resume is not None and (idempotency_key or require_validation or from_checkpoint):
        raise ArgumentsError(
            "resume is safe to repeat by itself; idempotency_key, require_validation and "
            "from_checkpoint are for new runs"
        )
    if limits is not None and resume is None:
        raise ArgumentsError(
            "limits is for resume; those of a new run are fields of the draft, such as max_tokens"
        )
    if dry_run:
        if resume is None:
            return preview_start(context.session, from_checkpoint)
        return preview_resume(context.session, resume)
    if not confirm and must_confirm(context.session, resume):
        return ask_for_confirmation(context.session, resume, from_checkpoint)
    if resume is not None:
        return _call_with_server(context, lambda: context.session.resume(resume, limits))
    return _call_with_server(
        context,
        lambda: context.session.start(
            key=idempotency_key,
            require_validation=require_validation,
            from_checkpoint=from_checkpoint,
            confirmed=confirm,
        ),
    )


def _call_with_server(context: CallContext, call: Callable[[], Answer]) -> Answer:
    """Return what `call` returns, and where a server is that had to be started for it."""
    notes: list[str] = []

    def announce(note: str) -> None:
        notes.append(note)
        context.report_progress(0.0, USUAL_START_S, note)

    answer = call_with_server(call, announce)
    if notes:
        note = f"no Prefect server ran here, so one was started with a runner. {notes[-1]}"
        answer = answer.model_copy(update={"server_started": note})
    return answer


@tool(READ_ONLY_HINTS)
def rl_check_status(context: CallContext, run_id: RunId) -> schemas.RateLimitedStatus:
    """Report the status, phase, estimated time, processes, metrics and last error of a run.

    `health` has the judgement of learning (too early, healthy, not learning, suspect, broken,
    unknown) with its evidence, the part that is stalled and since when, and the used share of each
    budget. A live report about the same run is returned once in 30 minutes; before that, the last
    one is returned with `rate_limited`. A change of status or phase is reported at once, and a run
    that has ended is always reported.
    """
    return context.session.get_status(run_id)


def _preview_stop(context: CallContext, *, run_id: str) -> schemas.StopAnswer | None:
    record = get_run(context.session.store, run_id)
    if record.has_ended or not is_paid(context.session, run_id):
        return None
    return schemas.StopAnswer(
        message=f"nothing was stopped: run {run_id} of {record.environment} is {record.status} on "
        f"profile {record.profile}, "
        "which may have cost money. It would save a checkpoint and end; ask the user, then call "
        "again with confirm=true",
        run_id=run_id,
        status=record.status,
        confirmation_required=True,
    )


@tool(ToolHints(destructive=True, idempotent=True), preview=_preview_stop)
def rl_stop_training(context: CallContext, run_id: RunId) -> schemas.StopAnswer:
    """[DESTRUCTIVE] Stop a run: it saves a checkpoint, then its processes end in order.

    Returns at once. The run can be resumed.
    """
    return context.session.stop(run_id)


@tool(READ_ONLY_HINTS)
def rl_get_results(context: CallContext, run_id: RunId) -> RunResults:
    """Return the results of a run: final metrics, a history of ten steps, held-out accuracy, and
    the trained weights with their paths and the local adapter folder.
    """
    return context.session.get_results(run_id)


@tool(READ_ONLY_HINTS)
def rl_get_rollouts(
    context: CallContext,
    run_id: RunId,
    step: RolloutStep = None,
    order: RolloutOrder = "worst",
    item: RolloutItem = None,
    limit: Annotated[int, Field(ge=1, le=100)] = 5,
) -> run_reports.RolloutList:
    """Return what the model answered in training: prompts, answers, scores and the reasons."""
    return run_reports.get_rollouts(context.session, run_id, step, order, item, limit)


@tool(READ_ONLY_HINTS)
def rl_list_runs(
    context: CallContext,
    limit: Annotated[
        int | None, Field(ge=1, le=1000, description="Maximum number of runs, newest first")
    ] = None,
) -> schemas.RunList:
    """List all runs with their statuses, newest first."""
    return context.session.list_runs(limit)


@tool(ToolHints(open_world=True))
def rl_test_inference(
    context: CallContext,
    num_steps: Annotated[
        int, Field(ge=1, le=100, description="Groups per model, each of one item")
    ] = 3,
    group_size: Annotated[int, Field(ge=1, le=256, description="Completions per item")] = 16,
    models: TestedModels = None,
    prompts: TestPrompts = None,
    max_tokens: Annotated[
        int, Field(ge=1, le=100_000, description="Of one response; with prompts only")
    ] = 256,
    temperature: Annotated[float, Field(ge=0, le=2, description="With prompts only")] = 1.0,
    test_id: Annotated[
        str | None, Field(max_length=100, description="A test that had not ended, to ask for again")
    ] = None,
) -> schemas.TestReport:
    """Test the selected environment before training: whether it works, whether a model can learn
    from it, and what a run would take.

    The environment is checked in stages, then models answer a few items. `summary.verdict` is
    learnable, too easy, too hard or broken, with its evidence per model; `summary.forecast` has
    tokens, time and money of a run with the draft's values. The call waits at most 25 seconds; a
    longer test continues, and `test_id` asks for it again.
    """
    if test_id is not None:
        return inference_tests.wait_for_test(context.session, test_id, context.report_progress)
    options: Json = {
        "steps": num_steps,
        "group_size": group_size,
        "models": models,
        "prompts": prompts,
    }
    if prompts:
        options |= {"max_tokens": max_tokens, "temperature": temperature}
    deadline = time.monotonic() + MAX_TEST_WAIT_S
    return _call_with_server(
        context,
        lambda: inference_tests.run_inference_test(
            context.session, options, context.report_progress, deadline
        ),
    )


@tool(ToolHints(open_world=True))
def rl_check_environment(
    context: CallContext,
    environment: Annotated[
        str | None, Field(max_length=200, description="A name from rl_list_environments")
    ] = None,
    new: CreateFile = False,
    install: InstallRequirements = False,
    model: AnsweringModel = None,
    check_id: Annotated[
        str | None,
        Field(max_length=100, description="A check that had not ended, to ask for again"),
    ] = None,
) -> schemas.EnvironmentCheck:
    """Check an environment that you are writing, without training and without the Prefect server.

    It checks the import, the configuration, the data set, correct and corrupted answers, and then a
    group of answers of a local model: scores, tokens, round trip, stop tokens, truncation. This
    takes half a minute. The call waits at most 25 seconds; a longer check continues, and `check_id`
    asks for it again.
    """
    if (environment is None) == (check_id is None):
        raise ArgumentsError(
            "rl_check_environment takes either environment, or check_id of a running check"
        )
    if environment is not None:
        check_id = environment_checks.start_check_job(
            environment, new=new, install=install, model=model
        ).check_id
    return environment_checks.wait_for_check_job(str(check_id), context.report_progress)


@tool(READ_ONLY_HINTS)
def rl_health_check(context: CallContext) -> schemas.ServiceHealth:
    """Report whether the Prefect server, the keys and the environments are available, the name of
    this session, and the running runs.
    """
    return health_check.check_health(context.session)


def list_session_models(session: AgentSession, profile: str | None) -> ModelList:
    """Return the models of a profile; by default of the draft's, or the default profile."""
    draft = session.session_file.read().draft
    default = draft.profile if draft else get_default_profile()
    return list_models(profile or default, session.store.home)
