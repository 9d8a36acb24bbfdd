"""Use private parts of Prefect, for which it has no public function.

stop_claiming_runs         `Runner.stop()` also kills the flow processes, without their `finally`
restart_cancellation_poll  the runner's own poll ends for good after three failures
list_running_ids           a cancelled run without a process has nobody who would end it
cancel_run                 `Runner.stop()` cancels the runs one after the other, up to 30 s each
keep_final_states          a cancellation marks a run as cancelled that has just completed
read_parameter_schema,     a deployment's form is made from the signature of its flow, and has no
write_parameter_schema     argument of its own
explain_refusals           the server does not say what is allowed for a parameter that it refuses
lock_sqlite_at_begin       the server's transactions fail with "database is locked"

Everything here was written for version `PREFECT_VERSION`; a test fails when another one is
installed, so that somebody compares this module with it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx
import jsonschema
from prefect.exceptions import PrefectException

from lachesis.base.errors import shorten
from lachesis.config.value_parsing import describe_allowed

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from prefect.client.schemas.objects import FlowRun
    from prefect.deployments.runner import RunnerDeployment
    from prefect.runner import Runner
    from prefect.utilities.callables import ParameterSchema
    from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction


log = logging.getLogger(__name__)
PREFECT_VERSION = "3.8.8"


def stop_claiming_runs(runner: Runner) -> None:
    """Leave flow runs that are scheduled from now on to the next runner."""
    runner._scheduled_run_poller.stopping = True


def restart_cancellation_poll(runner: Runner) -> None:
    """Begin polling for cancellations again if the poll has given up."""
    # The runner creates it when it starts; the consumer is the websocket that the poll replaces.
    observer = runner._cancelling_observer
    if observer is None or observer._consumer_task is None:
        return
    polling_task = observer._polling_task
    # A task that was cancelled belongs to a runner that ends.
    if polling_task is not None and polling_task.done() and not polling_task.cancelled():
        observer._start_polling_task(observer._consumer_task)


def list_running_ids(runner: Runner) -> list[UUID]:
    """Return the flow runs that have a process of this runner."""
    return list(runner._process_manager.flow_run_ids())


async def cancel_run(runner: Runner, flow_run_id: UUID) -> None:
    """Cancel one flow run and wait until its process has ended."""
    await runner._cancellation_manager.cancel_by_id(flow_run_id)


def keep_final_states(runner: Runner) -> None:
    """Let no cancellation by this runner overwrite a final state; call it after the start.

    A flow run that has completed has a process for some seconds more. A cancellation in that time,
    as at the end of the runner, would end the process and mark the run as cancelled, which the
    server accepts.
    """
    manager = runner._cancellation_manager
    cancel, finalize = manager.cancel, manager._finalize_cancelled_state

    async def cancel_unless_final(flow_run: FlowRun, state_msg: str | None = None) -> None:
        if flow_run.state is None or not flow_run.state.is_final():
            await cancel(flow_run, state_msg)

    async def finalize_unless_final(
        flow_run: FlowRun, state_updates: dict[str, object] | None = None
    ) -> bool:
        """Report a flow run's end unless it has ended otherwise; return whether that worked."""
        try:
            # Read again, because the flow may have completed while its process was being ended.
            current = await manager._client.read_flow_run(flow_run.id)
            if current.state is not None and current.state.is_final():
                return False
            return await finalize(flow_run, state_updates)
        except (httpx.HTTPError, PrefectException) as error:
            # An exception here would end the whole runner. The server is away; a run that it still
            # has as being cancelled is ended by `deployments.runner` once it is back.
            log.warning("the end of %s was not reported: %r", flow_run.name, error)
            return False

    setattr(manager, "cancel", cancel_unless_final)  # noqa: B010
    setattr(manager, "_finalize_cancelled_state", finalize_unless_final)  # noqa: B010


def read_parameter_schema(deployment: RunnerDeployment) -> ParameterSchema:
    """Return the schema of the parameters of a deployment."""
    return deployment._parameter_openapi_schema


def write_parameter_schema(deployment: RunnerDeployment, schema: ParameterSchema) -> None:
    """Replace the schema of the parameters of a deployment."""
    deployment._parameter_openapi_schema = schema


def explain_refusals() -> None:
    """Let the server in this process name the allowed values of a parameter that it refuses."""
    from prefect.utilities.schema_tools import validation

    class ExplainingJsonSchema:
        """Stand for the module `jsonschema` in Prefect's module."""

        SchemaError = jsonschema.SchemaError

        @staticmethod
        def validate(*args: Any, **options: Any) -> None:
            try:
                jsonschema.validate(*args, **options)
            except jsonschema.ValidationError as error:
                error.message = describe_refused_value(error)
                raise

    setattr(validation, "jsonschema", ExplainingJsonSchema)  # noqa: B010


def lock_sqlite_at_begin() -> None:
    """Let each transaction of the server in this process take SQLite's write lock when it begins.

    One that takes the lock at its first write is refused at once, without waiting, if another one
    has written since its first read; many are at the start of a server that removes old events.
    At its beginning a transaction waits for the lock as long as the server's busy timeout allows,
    one minute (https://www.sqlite.org/isolation.html).
    """
    from prefect.server.database.configurations import AioSqliteConfiguration

    begin_transaction = AioSqliteConfiguration.begin_transaction

    def begin_with_lock(
        self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
    ) -> AbstractAsyncContextManager[AsyncSessionTransaction]:
        return begin_transaction(self, session, with_for_update=True)

    setattr(AioSqliteConfiguration, "begin_transaction", begin_with_lock)  # noqa: B010


def describe_refused_value(error: jsonschema.ValidationError) -> str:
    """Return the reason of a refusal, with the allowed values."""
    schema: Any = error.schema
    properties = schema.get("properties", {})
    if error.validator == "required":
        values: Any = error.instance
        missing = [name for name in schema["required"] if name not in values]
        allowed = [f"{name}: {describe_allowed(properties[name])}" for name in missing]
        return f"{error.message}; allowed for {'; '.join(allowed)}"
    if error.validator == "additionalProperties":
        return f"{error.message}; allowed: {', '.join(properties)}"
    if error.validator == "enum":
        return error.message
    # The server lets each optional value be null, which nobody needs to know.
    kinds = [kind for kind in schema.get("anyOf", []) if kind.get("type") != "null"]
    if len(kinds) == 1:
        schema = {**{name: value for name, value in schema.items() if name != "anyOf"}, **kinds[0]}
    return f"it is {shorten(repr(error.instance))}; allowed: {describe_allowed(schema)}"
