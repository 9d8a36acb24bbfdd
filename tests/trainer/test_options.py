"""A run with every choice of the trainer made otherwise, through real processes; then its weights,
handed over.
"""

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lachesis.base.errors import CheckpointError
from lachesis.checkpoints import export_weights
from lachesis.weight_agreement.parity import check_adapter
from tests.trainer.test_exact_resume import Run

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
STEPS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory, random_model):
    folder = tmp_path_factory.mktemp("options")
    examples = folder / "examples.jsonl"
    examples.write_text(
        "\n".join(json.dumps({"prompt": f"{n}", "completion": "one"}) for n in range(12))
    )
    tinker = {
        "loss_fn": "auto", "advantage": "leave_one_out", "loss_aggregation": "sequence_mean",
        "kl_coefficient": 0.05, "grad_clip_norm": 1.0,
        "truncated_rollouts": "drop", "learning_rate_schedule": "linear", "learning_rate_warmup": 2,
        "clip_high_threshold": 1.3,
        "sft_file": str(examples), "sft_epochs": 4, "sft_batch_size": 4,
        "sft_learning_rate": 0.01,
    }  # fmt: skip
    made = Run(folder, random_model, steps=STEPS, env={"max_batches_offpolicy": 3}, tinker=tinker)
    made.attempt(kill_at=1)
    made.attempt()
    return made


def test_every_step_tells_what_was_chosen(run):
    steps: list[dict[str, Any]] = run.steps()
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    rates = [step["train/learning_rate"] / 1e-3 for step in steps]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    trained = [step for step in steps if step["batch/datums"]]
    assert trained
    for one in trained:
        assert 0 < one["kl/sampling_train"] < np.inf
        assert 0 < one["entropy/training"] < np.log(512)
        assert 0 <= one["loss/clipped_share"] <= 1
        assert 0 < one["optim/grad_norm"] < np.inf
        assert one["kl/base"] > 0.01, "the examples have moved the model away from the base model"


def test_the_examples_were_learned_first(run):
    found = json.loads((run.folder.path / "sft.json").read_text())
    assert (found["examples"], found["updates"]) == (12, 12)
    assert found["last_loss"] < 0.8 * found["first_loss"]
    log = run.folder.get_log_file("trainer").read_text()
    assert log.count("supervised update 12/12") == 1, (
        "a run that is killed after it goes on behind it"
    )
    assert run.resumed["step"] == 0


def test_exported_weights_are_verified_and_load_by_their_recipe(run, tmp_path):
    note = export_weights.export(run.record, run.folder, tmp_path / "out", merged=True)
    assert note["verified"] is True
    for entry in (note["parity"], note["parity_merged"]):
        assert entry["largest"] < 1e-3
        assert entry["tokens"] > 10
    assert {"adapter_config.json", "adapter_model.safetensors", "merged/model.safetensors"} <= set(
        note["sha256"]
    )
    assert note["base_revision"].startswith("sha256:")
    scope: dict[str, Any] = {}
    exec("\n".join(note["load"]), scope)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged", dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "out" / "merged").encode("12")])
    with torch.no_grad():
        torch.testing.assert_close(
            scope["model"](ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-4
        )


def test_other_weights_are_not_called_verified(run, tmp_path):
    local = export_weights.find_adapter_folder(
        run.folder, export_weights.Checkpoints(run.folder.checkpoints).find_resumable()
    )  # type: ignore[arg-type]
    assert local is not None
    copy = tmp_path / "adapter"
    copy.mkdir()
    tensors = load_file(local / "adapter_model.safetensors")
    save_file(
        {key: 1.5 * value for key, value in tensors.items()}, copy / "adapter_model.safetensors"
    )
    (copy / "adapter_config.json").write_text((local / "adapter_config.json").read_text())
    manifest = export_weights.Checkpoints(run.folder.checkpoints).find_resumable()
    assert manifest is not None
    texts = [(probe.tokens, probe.logprobs) for probe in manifest.probes]
    difference, _, _ = check_adapter(run.record.base_model, copy, texts, None)
    assert not difference.verified
    assert difference.largest > 1e-3
    with pytest.raises(CheckpointError, match="has no text to compare with"):
        check_adapter(run.record.base_model, copy, [], None)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        check_adapter(run.record.base_model, tmp_path, texts, None)
