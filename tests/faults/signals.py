"""The matrix of signals: which part, which signal, in which phase, and what has to come of it."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.struck_home import INTERVAL, Run, StruckHome, frozen

FROZEN_S = 30.0
NOTICED_S = 5.0
KILL, TERM, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP
SERVICES = ("engine", "api", "trainer", "environment")


@dataclass(frozen=True)
class Case:
    """`status` is how the run stands afterwards: "running" means that it trains on. `reason` is
    searched in its error.
    """

    part: str
    number: signal.Signals
    phase: str
    status: str
    reason: str = ""
    resume: bool = False
    told: bool = False
    """Whether the part ends well when it is told to, so that no death ends the run."""

    @property
    def name(self) -> str:
        return f"{self.part}-{self.number.name}-{self.phase}"


def play(served: StruckHome, case: Case, row: Callable[..., None]) -> None:
    """Start a run, break it, and look at what came of it."""
    run = served.take(case.phase, case.part)
    run.reach("running" if case.phase == "checkpointing" else case.phase, case.part)
    steps_before, attempt = (run.steps() or [0])[-1], run.record.attempt
    served.restarts += case.part in ("runner", "server") and case.number != STOP
    pid = served.part(case.part) if case.part in ("runner", "server") else run.pid(case.part)
    assert pid in served.processes(), f"{pid} is not ours"
    shown = _sign(served, run, case) if case.number != STOP else None
    if case.phase == "checkpointing":  # last of all, as a save is soon over
        run.reach("checkpointing")
    noticed = 0.0
    if case.number == STOP:
        with frozen(pid, FROZEN_S):
            pass
    else:
        noticed = _struck(served, case, pid, shown)
        run.struck[case.part] += 1
    if case.status == "running":
        run.advances()
        assert run.record.attempt == attempt, "the attempt went on"
        served.current, seen = run, "trains on"
    else:
        record = run.ended()
        assert record.status == case.status, record.error
        assert case.reason in (record.error or ""), record.error
        assert record.failed_service == (
            case.part if case.part in SERVICES and not case.told else None
        )
        assert run.kept() > steps_before - INTERVAL - 1, "no more is lost than the last interval"
        seen = (
            f"{record.status}: {(record.error or '').splitlines()[0][:70] if record.error else ''}"
        )
        if case.resume:
            served.serve()
            run.resume()
            served.current = run
            seen += "; resumed"
    expected = "trains on" if case.status == "running" else case.status
    kept = f"{run.kept()} of {steps_before}" if case.status != "running" else f"{run.kept()}"
    signal_ = f"{case.part} {case.number.name}{' 30 s' if case.number == STOP else ''}"
    noticed_text = f"{noticed:.1f}" if noticed else ""
    row(
        fault=signal_,
        phase=case.phase,
        expected=expected,
        seen=seen,
        noticed=noticed_text,
        kept=kept,
    )


def _struck(served: StruckHome, case: Case, pid: int, shown: Callable[[], bool] | None) -> float:
    """Send the signal; seconds until somebody is seen to know of the death, 0 where nobody has
    to.
    """
    os.kill(pid, case.number)
    if shown is None:
        return 0.0
    began = time.monotonic()
    if case.number == TERM:  # it may finish what it is doing; from its end on it must be noticed
        served.wait(
            lambda: pid not in served.processes(), 60, f"the end of {case.part}", poll_s=0.02
        )
        began = time.monotonic()
    served.wait(shown, NOTICED_S, f"the end of {case.part} to be noticed", poll_s=0.02)
    return time.monotonic() - began


def _sign(served: StruckHome, run: Run, case: Case) -> Callable[[], bool] | None:
    """Of a service, the run's record; of server and runner, a line of the launcher; of flow and
    reaper, the end of the first service. Flow and reaper end in order when they are told to.
    """
    if case.part in SERVICES:
        return _in_record(run, case.part)
    if case.part in ("server", "runner"):
        return _in_log(served, case.part)
    return _by_an_end(served, run) if case.number == KILL else None


def _in_record(run: Run, service: str) -> Callable[[], bool]:
    def shown() -> bool:
        record = run.record
        service_state = record.services.get(service)
        restarted = record.phase == f"restarting {service}"
        return (
            restarted
            or record.has_ended
            or (service_state is not None and service_state.state.startswith("exited"))
        )

    return shown


def _in_log(served: StruckHome, part: str) -> Callable[[], bool]:
    log, line = served.home / "launcher.log", f"the Prefect {part} exited"
    before = log.read_text().count(line)
    return lambda: log.read_text().count(line) > before


def _by_an_end(served: StruckHome, run: Run) -> Callable[[], bool]:
    living = {value.pid for value in run.record.services.values() if value.pid} & set(
        served.processes()
    )
    assert living, "no service runs that could end"
    return lambda: not living <= set(served.processes())
