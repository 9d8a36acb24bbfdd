"""Weights of a cloud run come home whole, and are compared by the server's own sampler."""

import pytest
import tinker
from safetensors import safe_open

from lachesis.base.errors import CheckpointError
from lachesis.checkpoints import download_weights
from lachesis.checkpoints.download_weights import download_checkpoint
from lachesis.weight_agreement import at_resume
from lachesis.weight_agreement.logprob_gap import FLOAT32_TOLERANCE, make_measured_tolerance
from tests.tinker_cloud.test_rehearsal_cloud import MODEL, PROMPT, make_datum


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(download_weights, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(download_weights, "MAX_PAUSE_S", 0.01)


@pytest.fixture
def trained(cloud):
    """A state and sampler weights that are clearly another model than the base."""
    with tinker.ServiceClient() as service:
        training = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
        for _ in range(3):
            training.forward_backward([make_datum()], "cross_entropy").result()
            training.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
        state = training.save_state("home", overwrite=True).result().path
        sampler = training.save_weights_for_sampler("home-sampler").result().path
        client = service.create_sampling_client(model_path=sampler).result()
        values = client.compute_logprobs(tinker.ModelInput.from_ints(PROMPT)).result()
    logprobs = ",".join(str(value) for value in values[1:])
    return {"state": state, "sampler": sampler, "logprobs": logprobs}


def count_copies(cloud):
    return cloud.cloud.bill.calls["save_weights_external"]


def test_a_file_that_breaks_off_is_continued(cloud, trained, tmp_path):
    cloud.begin("broken_download", count=3)
    assert download_checkpoint(trained["state"], tmp_path / "cache", tmp_path / "home") == 3
    with safe_open(tmp_path / "home" / "adapter_model.safetensors", framework="numpy") as tensors:
        assert list(tensors.keys())
    assert not (tmp_path / "cache").exists()


def test_a_second_command_goes_on_where_the_first_one_gave_up(cloud, trained, tmp_path):
    before = count_copies(cloud)
    cloud.begin("broken_download", count=None, share=0.0)
    with pytest.raises(CheckpointError, match="the same command goes on from there"):
        download_checkpoint(trained["state"], tmp_path / "cache", tmp_path / "home")
    cloud.lift()
    assert (tmp_path / "cache" / "copy.json").exists()
    assert download_checkpoint(trained["state"], tmp_path / "cache", tmp_path / "home") == 0
    assert count_copies(cloud) == before + 1, "the server has written one copy"


def test_the_server_compares_what_this_machine_cannot_load(cloud, trained):
    texts = [(PROMPT, [float(value) for value in trained["logprobs"].split(",")])]
    same = at_resume.check_on_server(MODEL, trained["sampler"], texts, FLOAT32_TOLERANCE)
    assert same.verified is True
    assert same.base_mean is not None
    assert same.base_mean > 0.05
    other = [(PROMPT, [value - 0.5 for value in texts[0][1]])]
    differs = at_resume.check_on_server(MODEL, trained["sampler"], other, FLOAT32_TOLERANCE)
    assert differs.verified is False
    with pytest.raises(CheckpointError, match="has no text to compare"):
        at_resume.check_on_server(MODEL, trained["sampler"], [], FLOAT32_TOLERANCE)


def test_the_tolerance_is_what_the_run_has_measured():
    assert make_measured_tolerance([]) is None
    exact = make_measured_tolerance([1e-6, 2e-6])
    rounded = make_measured_tolerance([0.004, 0.011, float("nan")])
    assert exact is not None
    assert rounded is not None
    assert (exact.measure, exact.limit) == ("mean", FLOAT32_TOLERANCE.limit)
    assert rounded.limit == pytest.approx(0.033)


@pytest.mark.parametrize("name", ["../run.json", "/tmp/run.json", "a/../../b"])
def test_a_server_cannot_choose_where_a_file_is_written(name):
    with pytest.raises(CheckpointError, match="outside of the download"):
        download_weights._refuse_outside_names([name])
