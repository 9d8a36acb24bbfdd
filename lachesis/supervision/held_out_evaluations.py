"""Evaluate the base model and the trained model of a run on held-out items.

The evaluation of the base model starts before the first step and does not delay it: the trainer
serves the untrained model throughout. If it fails while a service is restarted, it is repeated
after training.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import Any

from lachesis.base.errors import LachesisError, ProcessExitedError, StorageError
from lachesis.runs.held_out_results import (
    describe_point,
    read_evaluation,
    record_failed_evaluation,
    to_point,
)
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.supervision.readiness import ShowStep, wait_until_ended
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.services.plan import ServicePlan
from lachesis.supervision.services.spec import ServiceSpec
from lachesis.supervision.stop_requests import RequestToEnd

log = logging.getLogger("lachesis.flow")
JOIN_TIMEOUT_S = 5.0
TITLES = {"before": "evaluate base model", "after": "evaluate trained model"}


class HeldOutEvaluations:
    """Run the evaluations of one attempt."""

    def __init__(
        self,
        store: RunStore,
        run_id: str,
        plan: ServicePlan,
        group: ServiceGroup,
        check_stop_request: Callable[[], None],
        show_step: ShowStep,
    ) -> None:
        self.store, self.run_id, self.plan, self.group = store, run_id, plan, group
        self.folder = store.dir(run_id)
        self.check_stop_request, self.show_step = check_stop_request, show_step
        self.service_names = {spec.name for spec in plan.evaluations.values()}
        self._must_end = threading.Event()
        self._threads: list[threading.Thread] = []
        self._finished_names: set[str] = set()

    def begin(self) -> None:
        """Start the evaluations of the base model that have no result yet, and do not wait."""
        for name in self._list_missing("before"):
            with contextlib.suppress(ProcessExitedError):  # It is tried again after training.
                self.group.start(self.plan.evaluations[name])
                context = copy_context()
                thread = threading.Thread(
                    target=context.run, args=(self._evaluate_base, name), daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def end(self) -> None:
        """End the evaluations that still run, because the attempt ends."""
        self._must_end.set()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)

    def finish(self) -> None:
        """Wait for the evaluations of the base model, and evaluate the trained model.

        A failed evaluation is counted with its reason, and the run still completes.

        Raises:
            RequestToEnd: The run should end.
        """
        for thread in self._threads:
            while thread.is_alive():
                thread.join(1.0)
                self.check_stop_request()
        names = [*self._list_missing("before"), *self._list_missing("after")]
        for name in names:
            with contextlib.suppress(ProcessExitedError):  # A failed start is reported below.
                self.group.start(self.plan.evaluations[name])
        for name in names:
            self._evaluate_or_count(name)

    def _list_missing(self, when: str) -> list[str]:
        """Return the evaluations before or after training that have no result."""
        recorded = self.store.load(self.run_id).evaluation.get(when)
        return [
            name
            for name in self.plan.evaluations
            if name.partition("-")[0] == when
            and name not in self._finished_names
            # An earlier attempt has evaluated the same base model.
            and not (recorded and (self.folder.evaluation / name / "metrics.json").is_file())
        ]

    def _evaluate_base(self, name: str) -> None:
        with contextlib.suppress(LachesisError, RequestToEnd):
            self._evaluate(name, self._raise_if_ending)
        with contextlib.suppress(KeyError):
            self.group.forget_service(self.plan.evaluations[name].name)

    def _raise_if_ending(self) -> None:
        if self._must_end.is_set():
            raise RequestToEnd("the run ends")

    def _evaluate_or_count(self, name: str) -> None:
        try:
            self._evaluate(name, self.check_stop_request)
        except LachesisError as error:
            self.check_stop_request()  # The error may be caused by the end of the run.
            log.warning("no evaluation %s training: %s", name, error)
            _record_failure(self.store, self.run_id, name, str(error))
            spec = self.plan.evaluations[name]
            if self.group.is_running(spec.name):  # It hangs or prints endlessly.
                self.group.stop(spec.name)

    def _evaluate(self, name: str, on_poll: Callable[[], None]) -> None:
        when, _, environment = name.partition("-")
        title = f"{TITLES[when]} {environment}".rstrip()
        spec = self.plan.evaluations[name]
        self.show_step(title, lambda: self._wait_and_record(name, title, spec, on_poll))

    def _wait_and_record(
        self, name: str, title: str, spec: ServiceSpec, on_poll: Callable[[], None]
    ) -> None:
        needs = sorted({service.name for service in self.plan.services} & {"engine", "trainer"})
        wait_until_ended(self.group, spec, needs, on_poll=on_poll)
        when, _, environment = name.partition("-")
        results = read_evaluation(self.folder.evaluation / name)
        model = title.removeprefix("evaluate ")
        log.info("%s: held out %s", model, describe_point(to_point(results, 0)))
        if environment:
            results = {f"{environment}/{key}": value for key, value in results.items()}

        def add_results(record: RunRecord) -> Mapping[str, Any]:
            recorded = record.evaluation
            return {"evaluation": {**recorded, when: {**recorded.get(when, {}), **results}}}

        self.store.change(self.run_id, add_results)
        self._finished_names.add(name)


def _record_failure(store: RunStore, run_id: str, name: str, reason: str) -> None:
    """Count an evaluation that failed, before or after training. A full disk does not end the
    run.
    """
    when, _, environment = name.partition("-")
    record = store.load(run_id)
    step = 0 if when == "before" else record.total_steps
    with contextlib.suppress(StorageError):
        record_failed_evaluation(
            store.dir(run_id).failed_evaluations,
            step,
            environment or record.environment,
            f"{when} training: {reason}",
        )
