"""Inference tests on disk: a model answers a few items of an environment, and the environment scores the answers.

inference_tests/{test_id}/test.json  config.yaml  stages.jsonl  test_{env}_{model}.jsonl  test_{env}_{model}.log
    and beside them per model  .tally.json (what was counted)  .samples.jsonl (what was said)

A score above 0 is correct. A step is one group; it succeeds with at least one correct completion. Accuracies have three digits.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lachesis.base import paths
from lachesis.base.errors import StorageError, UnknownTestError
from lachesis.base.files import storage_errors, write_private
from lachesis.base.json_lines import read_json_lines
from lachesis.base.numbers import is_score
from lachesis.config.run_config import RunConfig, dump_yaml
from lachesis.runs.held_out import compute_interval
from lachesis.runs.store import RunDir, now_iso
from lachesis.validation.forecast import Forecast, Planned, Rollouts
from lachesis.validation.verdict import Seen, Verdict
from lachesis.validation.verdict import best as best_word

Json = dict[str, Any]
EMBEDDED = "embedded:"
DEFAULT_MODELS = (
    ("qwen/qwen3-8b", "Qwen3 8B", "small"),
    ("z-ai/glm-4.7-flash", "GLM-4.7 Flash", "medium"),
    ("minimax/minimax-m2.5", "MiniMax M2.5", "large"),
)


class TestOptions(BaseModel):
    """What may be chosen of a test. Without `models` the launch's own is tested, or at a paid profile the default three."""

    __test__ = False  # no test class of pytest

    num_steps: int = 3
    group_size: int = 16
    models: list[str] | None = None
    prompts: list[str] | None = None
    max_tokens: int | None = None
    temperature: float | None = None


class InferenceRequest(TestOptions):
    """What is asked of which models. `embedded:NAME_OR_FOLDER` is served on this machine, any other name by the endpoint."""

    environment: str
    environment_file: str
    models: list[str]


class Stage(BaseModel):
    """One step of a test and how it ended."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    name: str
    """import, config, dataset, model-free check, or inference and scoring with the model's name."""
    status: Literal["running", "passed", "failed", "not offered"]
    seconds: float = 0.0
    message: str | None = None


class InferenceTest(BaseModel):
    """One test; `result` is the contract's answer once it has ended."""

    test_id: str
    request: InferenceRequest
    class_name: str = ""
    fingerprint: str = ""
    """Of the environment's code as it was tested."""
    own_values: Json = {}
    """The values of the environment's own fields, which are part of what was tested."""
    planned: Planned | None = None
    """The run that this test was made for."""
    stages: list[Stage] = []
    status: Literal["pending", "running", "completed", "failed"] = "pending"
    error: str | None = None
    created_at: str = Field(default_factory=now_iso)
    ended_at: str | None = None
    result: Json | None = None

    @property
    def ended(self) -> bool:
        return self.status in ("completed", "failed")

    @property
    def verdict(self) -> str | None:
        """The word for the environment as a whole; None before the end, and with prompts of somebody's own."""
        summary = (self.result or {}).get("summary")
        word = summary.get("verdict") if isinstance(summary, dict) else None
        return word if isinstance(word, str) else None


OUTPUTS = (".jsonl", ".html", ".json", ".log", ".proxy.log", ".yaml", ".tally.json", ".samples.jsonl")


class InferenceTests:
    """All tests under one home."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or paths.home()
        self.root = self.home / "inference_tests"

    def dir(self, test_id: str) -> Path:
        return self.root / test_id

    def create(self, request: InferenceRequest, config_yaml: str, **about: Any) -> InferenceTest:
        """Raises StorageError."""
        record = InferenceTest(test_id=secrets.token_hex(4), request=request, **about)
        with storage_errors(self.root):
            self.dir(record.test_id).mkdir(parents=True, mode=0o700)
        write_private(self.dir(record.test_id) / "config.yaml", config_yaml)
        self.save(record)
        return record

    def discard(self, test_id: str) -> None:
        """Remove a test that was never submitted."""
        shutil.rmtree(self.dir(test_id), ignore_errors=True)

    def note_flow_run(self, test_id: str, flow_run_id: str) -> None:
        """Beside the record, which belongs to the flow from here on."""
        write_private(self.dir(test_id) / "flow_run_id", flow_run_id)

    def flow_run(self, test_id: str) -> str | None:
        try:
            return (self.dir(test_id) / "flow_run_id").read_text()
        except OSError:
            return None

    def save(self, record: InferenceTest) -> None:
        write_private(self.dir(record.test_id) / "test.json", record.model_dump_json(indent=2))

    def load(self, test_id: str) -> InferenceTest:
        """Raises UnknownTestError, or StorageError for a damaged record."""
        file = self.dir(test_id) / "test.json"
        if not re.fullmatch(r"[0-9a-f]{8}", test_id) or not file.is_file():
            known = sorted(one.parent.name for one in self.root.glob("*/test.json"))
            raise UnknownTestError(
                f"there is no inference test {test_id[:40]!r}; known: {', '.join(known[:10]) or 'none'}", available=known
            )
        with storage_errors(file):
            try:
                return InferenceTest.model_validate_json(file.read_bytes())
            except ValidationError as error:
                raise StorageError(f"{file} is damaged ({error.errors()[0]['msg']})") from error

    def all(self) -> list[InferenceTest]:
        """Every readable test, the newest first."""
        found = []
        for file in self.root.glob("*/test.json"):
            with contextlib.suppress(OSError, ValidationError):
                found.append(InferenceTest.model_validate_json(file.read_bytes()))
        return sorted(found, key=lambda test: test.created_at, reverse=True)

    def look(self, test_id: str) -> InferenceTest:
        """The test; ended as failed when its flow is gone, which the file that a living one holds tells."""
        test = self.load(test_id)
        if test.status == "running" and not self.holder(test_id).is_alive():
            return self.fail(test_id, "its flow is gone: the runner or the machine was stopped; start it again")
        return test

    def holder(self, test_id: str) -> RunDir:
        """Held while the test's flow or one of its processes lives."""
        return RunDir(self.root, test_id)

    def fail(self, test_id: str, reason: str) -> InferenceTest:
        """The test, ended with this reason if it has not ended meanwhile."""
        fresh = self.load(test_id)
        if fresh.ended:
            return fresh
        failed = fresh.model_copy(update={"status": "failed", "error": reason, "ended_at": now_iso()})
        self.save(failed)
        return failed

    def output(self, record: InferenceTest, model: str) -> Path:
        """Where this model's groups go; its other files lie beside it. A model that would have the file of an earlier one has
        its number in the name."""
        names = [re.sub(r"[^A-Za-z0-9._-]", "_", _short(one)) for one in record.request.models]
        index = record.request.models.index(model)
        number = f"-{index + 1}" if names[index] in names[:index] else ""
        return self.dir(record.test_id) / f"test_{record.request.environment}_{names[index]}{number}.jsonl"

    def files(self, record: InferenceTest, model: str) -> list[Path]:
        """Every file that a test of this model writes."""
        output = self.output(record, model)
        stems = [output, _own_groups(output)] if record.request.prompts else [output]
        return [stem.with_suffix(suffix) for stem in stems for suffix in OUTPUTS]

    def tally(self, record: InferenceTest, model: str) -> Path:
        return self.output(record, model).with_suffix(".tally.json")

    def samples(self, record: InferenceTest, model: str) -> Path:
        return self.output(record, model).with_suffix(".samples.jsonl")

    def groups_done(self, record: InferenceTest) -> int:
        """Groups that all models have answered until now."""
        return sum(len(_lines(self.output(record, model))) for model in record.request.models)


def model_result(
    output: Path, model: str, wandb_run: str, *, error: str | None, prompts: bool, verdict: Verdict | None = None,
    forecast: Forecast | None = None,
) -> Json:  # fmt: skip
    """What one model's file says, in the keys of the contract, with the verdict and the forecast beside them."""
    lines = _lines(output)
    known = {name: (title, scale) for name, title, scale in DEFAULT_MODELS}
    title, scale = known.get(model, (_short(model), "embedded" if model.startswith(EMBEDDED) else "custom"))
    steps = [_step(index, [float(one) for one in line["scores"] if is_score(one)]) for index, line in enumerate(lines, 1)]
    total, correct = sum(one["completions"] for one in steps), sum(one["correct"] for one in steps)
    good = sum(one["correct"] > 0 for one in steps)
    result: Json = {
        "model": model,
        "name": title,
        "scale": scale,
        "wandb_run": wandb_run,
        "output_file": str(output),
        "log_file": str(output.with_suffix(".log")),
        "steps": steps,
        "steps_tested": len(steps),
        "total_completions": total,
        "correct_completions": correct,
        "accuracy": round(correct / total, 3) if total else 0.0,
        "steps_with_correct": good,
        "step_success_rate": round(good / len(steps), 3) if steps else 0.0,
        "accuracy_interval": _interval(sum(one["correct"] / one["completions"] for one in steps if one["completions"]), steps),
        "step_success_interval": _interval(good, steps),
    }
    if prompts:
        result["prompts"] = [_prompt(line) for line in lines]
    told = {"verdict": verdict, "forecast": forecast}
    result |= {key: one.model_dump(mode="json") for key, one in told.items() if one is not None}
    return {**result, **({"error": error} if error else {})}


def seen(output: Path, tally: Json | None) -> Seen:
    """What one model's test has counted."""
    counted = tally or {}
    scores = [[float(score) for score in line["scores"] if is_score(score)] for line in _lines(output)]
    return Seen(
        scores_P=scores,
        empty=int(counted.get("empty", 0)),
        invalid=int(counted.get("invalid", 0)),
        completions=int(counted.get("completions", 0)),
        truncated=int(counted.get("truncated", 0)),
        errors=counted.get("errors") or {},
    )


def measured(output: Path, tally: Json | None) -> list[Rollouts]:
    """What each group took, for a forecast."""
    scores = [line["scores"] for line in _lines(output)]
    found = []
    for index, one in enumerate((tally or {}).get("per_group") or []):
        differ = index < len(scores) and len(set(scores[index])) > 1
        copies = max(1.0, one["completions"] / max(1, one["requests"]))
        numbers = {"prefill": one["prompt_tokens"], "sampled": one["sampled_tokens"], "seconds": one["seconds"]}
        found.append(Rollouts(rollouts=int(one["rollouts"]), copies=copies, signal=differ, **numbers))
    return found


def read_samples(file: Path) -> list[Json]:
    """What was asked and said in the first groups: `prompt`, `responses`, `scores`."""
    return [one for one in _lines(file) if isinstance(one.get("responses"), list)]


def whole_result(record: InferenceTest, models: list[Json], folder: Path) -> Json:
    """The contract's answer for all models."""
    request = record.request
    succeeded = [one for one in models if one["steps_tested"] and "error" not in one]
    best = max(succeeded, key=lambda one: one["accuracy"], default=None)
    per_model = request.num_steps * request.group_size
    words = [one["verdict"]["word"] for one in models if "verdict" in one]
    made = (best or {}).get("forecast")
    judged = {"verdict": best_word(words)} if words else {}
    return {
        "environment": request.environment,
        "environment_file": request.environment_file,
        "test_config": {
            "num_steps": request.num_steps,
            "group_size": request.group_size,
            "rollouts_per_model": per_model,
            "total_rollouts": per_model * len(request.models),
        },
        "models_tested": models,
        "summary": {
            "steps_requested": request.num_steps,
            "models_tested": len(models),
            "models_succeeded": len(succeeded),
            "best_model": best["model"] if best else None,
            "avg_accuracy": round(sum(one["accuracy"] for one in succeeded) / len(succeeded), 3) if succeeded else 0.0,
            "environment_working": bool(succeeded),
            "output_directory": str(folder),
            **judged,
            **({"forecast": made} if made else {}),
        },
    }


def _short(model: str) -> str:
    """The model's name; of a folder its last part."""
    name = model.removeprefix(EMBEDDED)
    return Path(name).name if Path(name).is_absolute() else name


def _step(number: int, scores: list[float]) -> Json:
    return {"step": number, "completions": len(scores), "correct": sum(score > 0 for score in scores), "scores": scores}


def _interval(successes: float, steps: list[Json]) -> Json | None:
    """Return the 95 % interval of a share over the groups that have answers, or None without any.

    Answers to one item are not independent, so the number of groups counts.
    """
    answered = [step for step in steps if step["completions"]]
    return compute_interval(successes / len(answered), len(answered)) if answered else None


def _prompt(line: Json) -> Json:
    responses = [{"text": text, "score": score} for text, score in zip(line["responses"], line["scores"], strict=True)]
    return {"prompt": line["prompt"], "responses": responses, **({"note": line["note"]} if line.get("note") else {})}


def _lines(output: Path) -> list[Json]:
    """The whole groups of a file that may still be written."""
    return [one for one in read_json_lines(output) if isinstance(one.get("scores"), list)]


def _own_groups(output: Path) -> Path:
    """Where the environment's own groups go while somebody's prompts are answered: `output` is for the answers to these."""
    return output.with_name(f"groups_{output.name}")


def probe_config(
    config: RunConfig, request: InferenceRequest, output: Path, endpoint: Json, wandb_run: str, *, use_wandb: bool = False
) -> str:
    """Return the YAML of the environment's `process` command for one model. `endpoint` holds the fields of Atropos' server
    section. With `use_wandb` the environment logs to W&B, which is offline in a test."""
    content = yaml.safe_load(config.to_yaml())
    groups = _own_groups(output) if request.prompts else output
    content["env"].update(
        total_steps=request.num_steps,
        group_size=request.group_size,
        use_wandb=use_wandb,
        wandb_name=wandb_run,
        data_path_to_save_groups=str(groups),
        include_messages=True,
        ensure_scores_are_not_same=False,
        steps_per_eval=0,
    )
    content["openai"] = [endpoint, dict(endpoint)]
    return dump_yaml(content)


def remote_endpoint(model: str, base_url: str) -> Json:
    """Return the server section for a model that answers at this address by OpenAI's protocol."""
    return {
        "model_name": model,
        "base_url": base_url,
        "api_key": "x",  # the environment's process puts its token here
        "server_type": "openai",
        "health_check": False,
        "timeout": 600,
        "num_max_requests_at_once": 64,
        "num_requests_for_eval": 64,
    }
