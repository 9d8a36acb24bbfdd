"""What is asked of a real run on the real chain: it has learned, and its weights can be used."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from wandb.proto import wandb_internal_pb2

from lachesis.base.json_text import Json
from lachesis.tiny_model.build import build_tokenizer

STEPS = 60
SETTINGS = {"total_steps": STEPS, "seed": 1, "steps_per_eval": 10, "use_wandb": True}


def check_what_was_learned(
    run_id: str,
    call: Callable[..., Any],
    cli: Callable[..., Any],
    start_engine: Callable[..., Any],
    folder: Path,
) -> None:
    """Check that reward and held-out accuracy rose, that every process ended well, that every
    surface says the same, and that PEFT samples like the engine.
    """
    results = call("rl_get_results", run_id=run_id)
    assert results["status"] == "completed", results
    assert results["reward"]["first"] <= 0.35
    assert results["reward"]["last"] >= 0.5
    assert results["held_out"]["after"] >= results["held_out"]["before"] + 0.35
    assert results["final_metrics"]["step"] == STEPS
    assert len(results["history"]) == 10
    assert Path(results["wandb_dir"]).is_dir(), "without a key W&B's files are local"
    status = cli("status", run_id)
    shown = {key: status[key] for key in results if key != "next_steps"}
    assert {**shown, "next_steps": results["next_steps"]} == results, "every surface says the same"
    assert status["processes"]["trainer"] == "exited (0)"
    assert set(status["processes"]) == {"engine", "api", "trainer", "env"}
    assert {row["run_id"]: row["status"] for row in cli("runs")["runs"]}[run_id] == "completed"
    _check_curve(
        results, status, call("rl_check_status", run_id=run_id), cli("report", run_id)["files"]
    )
    _check_weights(cli("export", run_id, "--to", str(folder)), results, start_engine)
    refused = cli("export", run_id, "--to", str(folder), expect=1)
    assert refused["code"] == "run_state"


def _check_curve(results: Json, status: Json, checked: Json, report: list[str]) -> None:
    """The held-out results of every tenth step, over MCP, in the status, the report and W&B's
    offline files.
    """
    curve = results["held_out_curve"]
    steps = [point["step"] for point in curve]
    assert (steps[0], steps[-1]) == (0, STEPS)
    assert set(steps) <= set(range(0, STEPS + 1, 10))
    assert len(steps) >= 4, "one that is due while another is under way is left out"
    assert {point["items"] for point in curve} == {20}
    assert all(point["low"] < point["high"] for point in curve)
    assert curve[-1]["percent_correct"] == results["held_out"]["after"]
    assert set(results["held_out_intervals"]) == {"before", "after"}
    for answer in (status, checked):
        assert answer["held_out_curve"] == curve
        assert answer["metrics"]["eval_percent_correct"] == curve[-1]["percent_correct"]
        assert 0 < answer["metrics"]["percent_correct"] <= 1
        assert answer["metrics"]["state"] == "completed"
    for point in curve:
        assert (
            f"<td>{point['step']}</td><td>{point['percent_correct']:.3f}</td><td>20</td>"
            in Path(report[0]).read_text()
        )
    manifest = json.loads(
        (Path(results["metrics_file"]).parent / "checkpoints" / "step-000060.json").read_text()
    )
    assert manifest["held_out"] == {
        "step": 60,
        "items": 20,
        "percent_correct": curve[-1]["percent_correct"],
    }
    logged = {
        round(line["eval/step"]): line["eval/percent_correct"]
        for line in _wandb_lines(Path(results["wandb_dir"]))
    }
    assert logged == {point["step"]: point["percent_correct"] for point in curve}


def _wandb_lines(folder: Path) -> list[Json]:
    """The lines of an offline run that have a held-out result."""
    (file,) = folder.glob("run-*.wandb")
    lines = []
    for content in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        items = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        if "eval/step" in items:
            lines.append(items)
    return lines


def _records(content: bytes) -> list[bytes]:
    """The records of W&B's file, which has LevelDB's format: blocks of 32 KiB with pieces
    (checksum, length, kind) in each.
    """
    records, place = [b""], 7  # behind the name of the format
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        records[-1] += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            records.append(b"")
    return records[:-1]


def _check_weights(
    note: dict[str, Any], results: dict[str, Any], start_engine: Callable[..., Any]
) -> None:
    """An engine on the run's checkpoints, asked through the SDK, against PEFT on the export."""
    store = Path(results["weights"]["adapter"]).parents[2]
    engine = start_engine(results["base_model"], store)
    prompt = build_tokenizer().encode("<|user|>3+4=<|end|><|assistant|>7<|end|>")
    with tinker.ServiceClient(base_url=engine.url, api_key=engine.token) as service:
        sampler = service.create_sampling_client(
            model_path=results["weights"]["sampler_weights"]
        ).result()
        served = sampler.compute_logprobs(tinker.ModelInput.from_ints(prompt)).result()[1:]
    engine.process.terminate()  # it works in the served home, which nothing may outlive
    engine.process.wait(20)
    base = AutoModelForCausalLM.from_pretrained(note["base_model"], dtype=torch.float32)
    with torch.no_grad():
        logits = (
            PeftModel.from_pretrained(base, note["path"])
            .eval()(torch.tensor([prompt]))
            .logits[0, :-1]
        )
    expected = torch.log_softmax(logits, -1)[
        torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])
    ]
    np.testing.assert_allclose(np.array(served, dtype=np.float64), expected.numpy(), atol=1e-3)
