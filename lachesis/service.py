"""The use cases behind the command line and every other surface. Everything that lasts is on disk or in Prefect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lachesis import config as configuration
from lachesis import discovery, launcher, models
from lachesis.config import RunConfig
from lachesis.discovery import Environment, Scan
from lachesis.errors import CheckpointError, FieldValueError, ModelNotFoundError, RunStateError
from lachesis.fields import Fields
from lachesis.metrics import MetricsFile, history
from lachesis.prefect_api import PrefectApi
from lachesis.profiles import check_profile
from lachesis.runs import RunRecord, RunStore, seconds_between, short_name, tail, write_private
from lachesis.trainer.checkpoints import Checkpoints
from lachesis.weights import adapter_folder

Json = dict[str, Any]
REWARD_STEPS = 5
"""The first and the last reward of a run are means over this many steps; one step has few prompts."""


@dataclass(frozen=True)
class Launch:
    """What somebody wants to train."""

    environment: str
    profile: str = "embedded"
    edits: tuple[tuple[str, Any], ...] = ()
    model: str | None = None
    seed: int | None = None


class Service:
    """One home folder. Every method raises LachesisError and nothing else that a user could cause."""

    def __init__(self, home: Path | None = None) -> None:
        self.store = RunStore(home)

    # --- environments -----------------------------------------------------------------------------------------------

    def environments(self) -> Scan:
        return discovery.scan()

    def describe(self, name: str, profile: str = "embedded") -> Json:
        """One environment and its fields, with the value that a run would have now."""
        configuration.profile_values(profile)
        environment = discovery.find(name)
        schema = discovery.schema(environment)
        fields = Fields(profile, schema)
        model = self._model(Launch(name, profile))
        preview = configuration.resolve(name, profile, {}, defaults=schema.values, model=model).model_dump()
        described = [
            {
                "name": field.name,
                "section": field.section,
                "type": field.type,
                "default": field.default,
                "description": field.description,
                "current_value": preview[field.section].get(field.name),
                "locked": field.locked,
            }
            for field in fields.by_name.values()
        ]
        return {**asdict(environment), "profile": profile, "fields": described, "warning": schema.warning}

    # --- runs -------------------------------------------------------------------------------------------------------

    def resolve(self, launch: Launch) -> tuple[Environment, RunConfig]:
        """The checked configuration of a launch, before anything is started."""
        environment = discovery.find(launch.environment)
        check_profile(launch.profile, launcher.key_names())
        schema = discovery.schema(environment)
        fields = Fields(launch.profile, schema)
        model = self._model(launch)
        base = configuration.resolve(launch.environment, launch.profile, {}, defaults=schema.values, model=model)
        edits: dict[str, dict[str, Any]] = {}
        own: dict[str, Any] = {}
        for name, value in launch.edits:
            field, checked = fields.edit(name, value, base)
            edits.setdefault(field.section, {})[field.name] = checked
            if field.section == "env" and field.name not in configuration.EnvSection.model_fields:
                own[field.name] = checked
        if launch.seed is not None:
            edits.setdefault("tinker", {})["seed"] = launch.seed
        config = configuration.resolve(launch.environment, launch.profile, edits, defaults=schema.values, model=model)
        if own:  # validators of the environment's own class run in its own process only
            complaints = discovery.check_values(environment, own)
            if complaints:
                raise FieldValueError(f"{environment.name} refuses its configuration: {'; '.join(complaints)}")
        return environment, config

    def start(self, launch: Launch, progress: models.Progress = lambda done, total: None) -> RunRecord:
        """Create a run and submit it; no run is left behind when this raises. The tiny model is built when it is needed and
        missing, and `progress` told of it."""
        environment, config = self.resolve(launch)
        PrefectApi()  # a missing server is told before anything is made
        if launch.profile == "embedded" and launch.model is None:
            models.build(models.Recipe(), self.store.home, progress)
        run_id = self.store.new_id()
        record = RunRecord(
            run_id=run_id,
            environment=environment.name,
            environment_file=environment.file_path,
            profile=launch.profile,
            base_model=config.openai.model_name,
            total_steps=config.env.total_steps,
            seed=config.tinker.seed,
            wandb_project=config.tinker.wandb_project,
            wandb_run_name=f"{environment.name}-{run_id}",
        )
        folder = self.store.create(record)
        try:
            write_private(folder.config, config.to_yaml())
            return launcher.submit(self.store, record)
        except BaseException:
            self.store.discard(run_id)
            raise

    def resume(self, run_id: str) -> RunRecord:
        """Continue an ended run from its newest complete checkpoint; a run that lives is returned as it is."""
        record = self.get(run_id)
        if not record.ended:
            return record
        if record.status == "completed":
            raise RunStateError(f"run {run_id} has completed its {record.total_steps} steps; start a new run to go on")
        check_profile(record.profile, launcher.key_names())
        Checkpoints(self.store.dir(run_id).checkpoints).newest()  # a damaged manifest is told before anything changes
        queued = self.store.update(
            run_id, status="pending", phase="queued", error=None, attempt=record.attempt + 1, services={}, started_at=None
        )
        try:
            return launcher.submit(self.store, queued)
        except BaseException:
            self.store.update(
                run_id, **record.model_dump(include={"status", "phase", "error", "attempt", "services", "started_at"})
            )
            raise

    def get(self, run_id: str) -> RunRecord:
        return launcher.refresh(self.store, self.store.load(run_id))

    def runs(self) -> list[RunRecord]:
        return [launcher.refresh(self.store, record) for record in self.store.all()]

    def status(self, run_id: str) -> Json:
        """The keys of the contract, and phase, progress and next steps."""
        record = self.get(run_id)
        steps = self.metrics(run_id)
        last = steps[-1] if steps else {}
        started = record.started_at or record.created_at
        minutes = seconds_between(started, record.ended_at if record.ended else None) / 60
        status: Json = {
            "run_id": run_id,
            "status": record.status,
            "phase": record.phase,
            "environment": record.environment,
            "running_time_minutes": round(minutes, 2),
            "processes": {short_name(name): service.state for name, service in record.services.items()},
            "progress": {"step": last.get("step", 0), "total": record.total_steps},
            "wandb_project": record.wandb_project,
            "wandb_run_name": record.wandb_run_name,
            "logs": {short_name(name): service.log for name, service in record.services.items()},
            "metrics": {
                "step": last.get("step", 0),
                "reward_mean": last.get("reward/mean"),
                "percent_correct": record.evaluation.get("after", {}).get("train/percent_correct"),
                "eval_percent_correct": record.evaluation.get("after", {}).get("eval/percent_correct"),
            },
            "ui_url": launcher.ui_url(record),
            "next_steps": _next_steps(record),
        }
        if record.wandb_url:
            status["wandb_url"] = record.wandb_url
        if record.error:
            status["error"] = record.error
        return status

    def metrics(self, run_id: str) -> list[Json]:
        """Every step of the run."""
        self.store.load(run_id)
        return MetricsFile(self.store.dir(run_id).metrics).read()

    def stop(self, run_id: str) -> Json:
        """Ask the run to save a checkpoint and end; returns at once."""
        record = self.get(run_id)
        if record.ended:
            return {"message": f"run {run_id} is not running", "run_id": run_id, "status": record.status}
        launcher.cancel(self.store, record)
        return {"message": f"run {run_id} is being stopped", "run_id": run_id, "status": self.get(run_id).status}

    def results(self, run_id: str) -> Json:
        """Final metrics, a history of ten samples, held-out evaluation and the weights under typed names."""
        record = self.get(run_id)
        folder = self.store.dir(run_id)
        steps = self.metrics(run_id)
        weights: Json = {}
        try:
            newest = Checkpoints(folder.checkpoints).newest()
        except CheckpointError as error:
            newest, weights = None, {"warning": str(error)}
        if newest is not None:
            adapter = adapter_folder(folder, newest)
            weights = {
                "step": newest.step,
                "sampler_weights": newest.sampler_weights,
                "state": newest.state,
                "adapter": str(adapter) if adapter else None,
            }
        result: Json = {
            "run_id": run_id,
            "status": record.status,
            "environment": record.environment,
            "base_model": record.base_model,
            "wandb_project": record.wandb_project,
            "wandb_run_name": record.wandb_run_name,
            "reward": {"first": _mean_reward(steps[:REWARD_STEPS]), "last": _mean_reward(steps[-REWARD_STEPS:])}
            if steps
            else {},
            "held_out": {which: _accuracy(found) for which, found in record.evaluation.items()},
            "weights": weights,
            "final_metrics": steps[-1] if steps else {},
            "history": history(steps),
            "metrics_file": str(folder.metrics),
        }
        return {**result, **({"wandb_url": record.wandb_url} if record.wandb_url else {}), **_error(record)}

    def log(self, run_id: str, service: str, lines: int = 50) -> tuple[Path, str, int]:
        """The file, its last lines, and the position to read on from. `service` is a name of the plan, or a short one."""
        self.store.load(run_id)
        path = self.store.dir(run_id).log(service)
        position = path.stat().st_size if path.exists() else 0
        return path, tail(path, lines), position

    def _model(self, launch: Launch) -> str | None:
        if launch.model is None:
            return str(models.tiny_path(models.Recipe(), self.store.home)) if launch.profile == "embedded" else None
        folder = Path(launch.model).expanduser()
        if not folder.exists() and not launch.model.startswith(("/", ".", "~")):
            return launch.model  # a name on the Hub
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(f"{folder} holds no model (no config.json there); `lachesis model build` makes a tiny one")
        return str(folder.resolve())


def _mean_reward(steps: list[Json]) -> float:
    return round(sum(float(one["reward/mean"]) for one in steps) / len(steps), 4)


def _accuracy(metrics: Mapping[str, float]) -> float | None:
    return metrics.get("eval/percent_correct", next(iter(metrics.values()), None))


def _error(record: RunRecord) -> Json:
    return {"error": record.error} if record.error else {}


def _next_steps(record: RunRecord) -> list[str]:
    run = record.run_id
    if record.status == "completed":
        return [f"lachesis results {run}", f"lachesis weights {run} --to DIR"]
    if record.status in ("failed", "stopped"):
        return [f"lachesis logs {run} trainer", f"lachesis train --resume {run}", f"lachesis results {run}"]
    return [f"lachesis status {run}", f"lachesis logs {run} trainer -f", f"lachesis stop {run}"]
