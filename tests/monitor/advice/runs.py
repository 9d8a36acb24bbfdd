"""A run on disk whose steps have a fault, what is advised about it, and a trial of the advice."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lachesis.base import paths
from lachesis.base.timestamps import now_iso
from lachesis.cli.options import DEFAULT_PROFILE
from lachesis.config import run_config as run_config
from lachesis.config.launch_spec import LaunchSpec, parse_assignment
from lachesis.environment_catalog import lookup
from lachesis.monitor.observe import observe_files
from lachesis.monitor.run_health import judge_observation
from lachesis.monitor.tick_memory import MonitorMemory
from lachesis.operations.launches import describe_launch, preview_launch
from lachesis.operations.runs import get_run, read_log
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.tiny_model import build
from lachesis.web.report_file import write_report
from tests.harness.command_line import parse_command
from tests.harness.home import write_run

RUN = "0123abcd"
COMMAND = re.compile(r"`(lachesis [^`]+)`")
WORKED: set[str] = set()
GOOD = {
    "batch/rollouts": 128,
    "rollouts/invalid": 0,
    "train/learning_rate": 1.5e-3,
    "weights/change": 0.1,
    "entropy/sampling": 1.0,
    "logprobs/gap": 0.01,
}
FAULTS: dict[str, dict[str, Any]] = {
    "weights stay": {"weights/change": 0.0},
    "loss is no number": {"train/loss": float("nan")},
    "no signal": {"batch/zero_signal_share": 1.0, "reward/mean": 0.0},
    "nothing is sent": {"rollouts/dropped": 12_800},
    "sampler and trainer disagree": {"logprobs/gap": 2.0},
    "rollouts fail": {"rollouts/invalid": 1000},
    "one of several has no reward": {"environments/arithmetic/reward_mean": 0.0},
    "the reward falls": {"reward/mean": 0.01},
    "the reward stays": {"reward/mean": 0.3},
    "the entropy is gone": {"entropy/sampling": 0.0, "reward/mean": 0.2},
    "the length drifts": {"length/mean": 90.0},
    "cut off": {"rollouts/truncated_share": 0.9},
    "held-out falls": {
        "eval/percent_correct": 0.1,
        "eval/low": 0.09,
        "eval/high": 0.11,
        "eval/step": 39,
    },
    "held-out lags": {
        "eval/percent_correct": 0.31,
        "eval/low": 0.3,
        "eval/high": 0.32,
        "eval/step": 39,
    },
}


def make(store: RunStore, *, profile: str = "embedded", **changes: Any) -> RunRecord:
    tiny = str(build.get_tiny_model_path(build.TinyModelRecipe(), store.home))
    model = tiny if profile == "embedded" else "Qwen/Qwen3-8B"
    if profile == "embedded":
        Path(tiny).mkdir(parents=True, exist_ok=True)
        (Path(tiny) / "config.json").write_text("{}")
    values = {
        "environment": "arithmetic",
        "environment_file": str(paths.project_dir() / "environments" / "arithmetic.py"),
        "profile": profile,
        "base_model": model,
        "total_steps": 100,
        "status": "running",
        "started_at": now_iso(),
    }
    return write_run(store, run_id=RUN, **{**values, **changes})


def write_steps(store: RunStore, fault: dict[str, Any]) -> None:
    """Forty good steps with a rising reward, and as many with the fault."""
    metrics = MetricsFile(store.dir(RUN).metrics)
    for step, values in list_faulty_steps(fault):
        metrics.append(step, values)


def list_faulty_steps(fault: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Give forty good steps with a rising reward, and as many with the fault."""
    flat = fault.get("reward/mean") == 0.3
    for step in range(1, 81):
        known = {
            "reward/mean": 0.3 if flat else 0.2 + step / 200,
            "length/mean": 10.0,
            "train/loss": 0.1,
            **GOOD,
        }
        if step % 10 == 0 and "eval/low" in fault:
            known |= {
                "eval/percent_correct": 0.3,
                "eval/low": 0.29,
                "eval/high": 0.31,
                "eval/step": step - 1,
            }
        has_fault = step > 40 and (step % 10 == 0 or "eval/low" not in fault)
        yield step, {**known, **(fault if has_fault else {})}


def advice_of(store: RunStore) -> tuple[str, list[str]]:
    health = judge_observation(observe_files(store, store.load(RUN)), MonitorMemory())
    assert len(health.advice) <= len(health.evidence), "several signs may have one remedy"
    assert len(set(health.advice)) == len(health.advice)
    return health.word, health.advice


def require_works(command: str, store: RunStore) -> None:
    """Parse the command, and do what it does as far as no server is needed for it. What takes long
    is done once.
    """
    if command in WORKED:
        return
    args = parse_command(shlex.split(command)[1:])
    if args.command == "train":
        args.profile = args.profile or DEFAULT_PROFILE
    run = getattr(args, "run", "")
    if args.command == "stop":
        assert not get_run(store, run).has_ended, "there must be something to stop"
    elif args.command == "logs":
        read_log(store, run, args.service_name)
    elif args.command == "report":
        assert write_report(store, *args.runs)
        WORKED.add(command)
    elif args.command == "test":
        spec = LaunchSpec(
            environment=args.environment, profile=args.profile, model=(args.model or [None])[0]
        )
        assert describe_launch(store, spec)["problem"] is None
        WORKED.add(command)
    elif args.command == "train":
        preview_launch(
            store,
            LaunchSpec(
                environment=args.environment,
                profile=args.profile,
                settings=dict(parse_assignment(text) for text in args.edits),
                model=args.model,
                from_checkpoint=args.start_from,
                by_agent=True,
            ),
        )
    elif args.command == "model build":
        assert [lookup.find_environment(name) for name in args.environments]
    else:
        assert args.command == "env check"
        assert lookup.find_environment(lookup.register_environment(args.environment))
