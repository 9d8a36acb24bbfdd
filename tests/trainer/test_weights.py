"""Weights of a real run, handed over: which checkpoint, judged by the precision of its server, and
written as a whole.
"""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lachesis.base.errors import CheckpointError, RunStateError
from lachesis.checkpoints import export_weights
from lachesis.checkpoints.manifests import Checkpoints, HeldOutResult
from lachesis.cli import terminal
from lachesis.cli.commands import run_status
from lachesis.cli.main import main
from lachesis.weight_agreement import at_export

pytestmark = pytest.mark.timeout(600)
STEPS = 6
BFLOAT16_NOISE = 0.0125
"""Standard deviation; its mean size is 0.01 nats."""


def rewrite(folder, step, **changes):
    """Change the manifest of a step."""
    checkpoints = Checkpoints(folder.checkpoints)
    checkpoints.write(checkpoints.select(str(step)).model_copy(update=changes))


def replace_adapter(folder, step, tensors):
    """Put other weights in place of those of a step, as if the server had saved those."""
    checkpoints = Checkpoints(folder.checkpoints)
    manifest = checkpoints.select(str(step))
    save_file(tensors, adapter(folder, manifest) / "adapter_model.safetensors")
    checkpoints.write(manifest)


def adapter(folder, manifest):
    place = export_weights.find_adapter_folder(folder, manifest)
    assert place is not None
    return place


def add_noise(folder, step):
    """Let the server have computed the log-probabilities of a step with as much rounding as
    bfloat16 has.
    """
    chance = random.Random(0)
    probes = Checkpoints(folder.checkpoints).select(str(step)).probes
    noisy = [
        probe.model_copy(
            update={
                "logprobs": [value + chance.gauss(0, BFLOAT16_NOISE) for value in probe.logprobs]
            }
        )
        for probe in probes
    ]
    rewrite(folder, step, probes=noisy)


def test_last_best_and_a_step_can_be_exported(trained, folder, tmp_path):
    for step, percent_correct in ((2, 0.4), (4, 0.6)):
        rewrite(
            folder,
            step,
            held_out=HeldOutResult(percent_correct=percent_correct, items=50, step=step),
        )
    last = export_weights.export(trained.record, folder, tmp_path / "last", verify=False)
    assert last["step"] == STEPS
    assert last["better"] == {
        "step": 4,
        "reason": "held-out accuracy 0.600 on 50 items instead of no held-out result",
    }
    best = export_weights.export(trained.record, folder, tmp_path / "best", checkpoint="best")
    assert (best["step"], best["verified"]) == (4, True)
    assert best["held_out"] == {"percent_correct": 0.6, "items": 50, "step": 4}
    assert "better" not in best
    assert (
        export_weights.export(
            trained.record, folder, tmp_path / "two", checkpoint="2", verify=False
        )["step"]
        == 2
    )
    files = [
        (tmp_path / name / "adapter_model.safetensors").read_bytes()
        for name in ("last", "best", "two")
    ]
    assert len(set(files)) == 3
    with pytest.raises(
        RunStateError, match="no complete checkpoint '3'; allowed: best, last, 2, 4, 6"
    ):
        export_weights.export(trained.record, folder, tmp_path / "three", checkpoint="3")
    assert not (tmp_path / "three").exists()


def test_the_report_of_a_run_names_the_better_checkpoint(trained, folder):
    for step, reward in ((2, 0.9), (4, 0.5), (6, 0.25)):
        rewrite(folder, step, reward=reward)
    found = export_weights.find_weights(folder)
    assert found.step == STEPS
    assert found.best is not None
    assert (found.best.step, found.best.reason) == (
        2,
        "mean reward 0.900 instead of mean reward 0.250",
    )
    assert found.best.adapter == str(adapter(folder, Checkpoints(folder.checkpoints).select("2")))
    rewrite(folder, 6, reward=0.95)
    assert export_weights.find_weights(folder).best is None


def test_the_command_takes_a_checkpoint(trained, folder, tmp_path, monkeypatch, capsys):
    rewrite(folder, 4, reward=2.0)
    monkeypatch.setenv("LACHESIS_HOME", str(tmp_path))
    command = ["export", trained.record.run_id, "--no-verify"]
    assert main([*command, "--to", str(tmp_path / "best"), "--checkpoint", "best", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 4
    assert main([*command, "--to", str(tmp_path / "last")]) == 0
    assert "mean reward 2.000" in " ".join(capsys.readouterr().out.split())
    assert main([*command, "--to", str(tmp_path / "none"), "--checkpoint", "newest"]) == 1
    assert "allowed: best, last, 2, 4, 6" in " ".join(capsys.readouterr().err.split())


def remove_base(record, folder):
    return record.model_copy(update={"base_model": "/no/such/model"})


def spoil_adapter(record, folder):
    place = adapter(folder, Checkpoints(folder.checkpoints).select("last"))
    tensors = load_file(place / "adapter_model.safetensors")
    replace_adapter(folder, STEPS, {key: 1.5 * value for key, value in tensors.items()})
    return record


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_base, "cannot be loaded on /no/such/model"),
        (spoil_adapter, "differs from the trained weights"),
    ],
)
@pytest.mark.parametrize("exists", [False, True])
def test_an_export_that_fails_leaves_nothing_and_can_be_repeated(
    trained, folder, tmp_path, damage, message, exists
):
    place = tmp_path / "out"
    target = place / "adapter"
    place.mkdir()
    if exists:
        target.mkdir()
    record = damage(trained.record, folder)
    with pytest.raises(CheckpointError, match=message):
        export_weights.export(record, folder, target, merged=True)
    assert list(place.rglob("*")) == [target] * exists
    note = export_weights.export(record, folder, target, verify=False)
    assert json.loads((target / "lachesis.json").read_text())["sha256"] == note["sha256"]
    assert {one.name for one in target.iterdir()} == {
        *export_weights.ADAPTER_FILES,
        "lachesis.json",
    }
    assert list(place.iterdir()) == [target]


def test_good_weights_of_a_server_in_bfloat16_are_verified(trained, folder, tmp_path):
    """The largest difference of a token is far above what float32 may have."""
    add_noise(folder, STEPS)
    cloud = trained.record.model_copy(update={"profile": "tinker"})
    note = export_weights.export(cloud, folder, tmp_path / "cloud", merged=True)
    for parity in (note["parity"], note["parity_merged"]):
        assert parity["largest"] > 1e-2
        assert 5e-3 < parity["mean"] < 2e-2
        assert (parity["measure"], parity["limit"], parity["verified"]) == ("mean", 0.05, True)
    with terminal.console.capture() as shown:
        terminal.console.print(run_status.render_export(note))
    text = " ".join(shown.get().split())
    assert "verified: log-probabilities of" in text
    assert "nats on average (allowed: 0.05) and by" in text
    with pytest.raises(
        CheckpointError,
        match=r"differs from the trained weights: .* by \S+ at most \(allowed: 0\.001\)",
    ):
        export_weights.export(trained.record, folder, tmp_path / "embedded")


def test_an_empty_adapter_is_not_verified_where_training_changed_little(trained, folder, tmp_path):
    """It is the base model, which is within the limit. It is written, as it may be the trained
    adapter all the same."""
    model = trained.record.base_model
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    probes, last = [], Checkpoints(folder.checkpoints).select("last")
    for probe in last.probes:
        with torch.no_grad():
            shares = torch.log_softmax(base(torch.tensor([probe.tokens])).logits[0, :-1], -1)
        values = shares.gather(1, torch.tensor(probe.tokens)[1:, None])[:, 0]
        probes.append(probe.model_copy(update={"logprobs": values.tolist()}))
    rewrite(folder, STEPS, probes=probes)
    add_noise(folder, STEPS)
    tensors = load_file(adapter(folder, last) / "adapter_model.safetensors")
    empty = {key: 0 * value if "lora_B" in key else value for key, value in tensors.items()}
    replace_adapter(folder, STEPS, empty)
    cloud = trained.record.model_copy(update={"profile": "tinker"})
    note = export_weights.export(cloud, folder, tmp_path / "out", merged=True)
    assert json.loads((tmp_path / "out" / "lachesis.json").read_text())["verified"] is None
    assert note["verified"] is None
    assert note["parity"]["verified"] is note["parity_merged"]["verified"] is None
    with terminal.console.capture() as shown:
        terminal.console.print(run_status.render_export(note))
    text = " ".join(shown.get().split())
    verdict = "not verified, because the base model differs less than twice as much"
    assert f"{verdict}: log-probabilities of" in text


@pytest.mark.parametrize("factor", [0.0, -1.0, 3.0])
def test_wrong_weights_of_a_server_in_bfloat16_are_refused(trained, folder, tmp_path, factor):
    """The adapter was not trained, was subtracted, or was scaled wrongly."""
    add_noise(folder, STEPS)
    tensors = load_file(
        adapter(folder, Checkpoints(folder.checkpoints).select("last"))
        / "adapter_model.safetensors"
    )
    wrong = {key: factor * value if "lora_B" in key else value for key, value in tensors.items()}
    replace_adapter(folder, STEPS, wrong)
    cloud = trained.record.model_copy(update={"profile": "tinker"})
    with pytest.raises(
        CheckpointError, match=r"differs from the trained weights: .* on average \(allowed: 0\.05\)"
    ):
        export_weights.export(cloud, folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("gap", "by_server", "here"), [(1e-7, 1e-3, 0.05), (0.01, 0.03, 0.05), (0.03, 0.09, 0.09)]
)
def test_a_measured_difference_only_raises_the_limit_of_this_machine(
    trained, folder, gap, by_server, here
):
    """Two halves of a server that round alike agree, and yet differ from float32."""
    cloud = trained.record.model_copy(update={"profile": "tinker"})
    folder.metrics.write_text(json.dumps({"step": 1, "weights/sampler_gap": gap}) + "\n")
    measured = at_export.measure_tolerance(cloud, folder)
    chosen = at_export.choose_tolerance(cloud, folder)
    assert (measured.limit, chosen.limit) == pytest.approx((by_server, here))
    assert {measured.measure, chosen.measure} == {"mean"}
    assert at_export.choose_tolerance(trained.record, folder).measure == "largest"
