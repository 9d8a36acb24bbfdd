"""The real `tinker` SDK asks the engine: adapters, errors, listings, and the `tinker` command."""

import json
import os
import subprocess
import sys

import httpx
import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lachesis.base.tinker_client import wait_for_sdk
from tests.engine.training_steps import PROMPT, checkpoint_folder, datums, ids, step
from tests.harness.sdk_versions import needs_sdk


def test_an_exported_adapter_gives_the_same_logprobs_in_peft(training, engine):
    """What the engine samples with is what `peft` loads."""
    for number in range(3):
        step(training, datums(seed=number))
    path = training.save_weights_for_sampler("peft").result().path
    sampler = wait_for_sdk(training.create_sampling_client(path))
    served = sampler.compute_logprobs(ids(PROMPT)).result()[1:]
    base = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(checkpoint_folder(engine, path))).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1)[
        torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])
    ]
    np.testing.assert_allclose(np.array(served, dtype=np.float64), expected.numpy(), atol=1e-3)


def test_a_snapshot_does_not_move_with_training(training):
    """A reference policy must stay where it was."""
    frozen = wait_for_sdk(training.save_weights_and_get_sampling_client())
    before = frozen.compute_logprobs(ids(PROMPT)).result()
    step(training, datums())
    moved = wait_for_sdk(training.save_weights_and_get_sampling_client())
    assert frozen.compute_logprobs(ids(PROMPT)).result() == before
    assert moved.compute_logprobs(ids(PROMPT)).result() != before


def test_an_error_leaves_the_client_usable(training):
    """Each mistake names itself, and the next call works."""
    good = datums(1)
    short = tinker.Datum(
        model_input=ids([1, 2, 3]),
        loss_fn_inputs={
            "target_tokens": np.array([2, 3]),
            "logprobs": np.zeros(2, np.float32),
            "advantages": np.ones(2, np.float32),
        },
    )
    outside = tinker.Datum(
        model_input=ids([1, 9999]), loss_fn_inputs={"target_tokens": np.array([2, 3])}
    )
    lacking = tinker.Datum(
        model_input=ids([1, 2]), loss_fn_inputs={"target_tokens": np.array([2, 3])}
    )
    for data, loss, message in (
        (good, "stable_reinforce", "'stable_reinforce' is not supported"),
        ([short], "importance_sampling", "model_input has 3 tokens, target_tokens has 2"),
        ([outside], "cross_entropy", "datum 0: model_input has a token id outside the vocabulary"),
        ([lacking], "ppo", "datum 0 lacks logprobs, advantages, which ppo needs"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=message):
            training.forward_backward(data, loss).result()
    with pytest.raises(tinker.RequestFailedError, match="already exists"):
        training.save_state("twice").result(), training.save_state("twice").result()
    assert step(training, good).metrics["loss:sum"] != 0


def test_a_wrong_token_or_model_is_refused(service, engine):
    assert httpx.get(f"{engine.url}/api/v1/healthz").status_code == 401
    assert (
        httpx.post(
            f"{engine.url}/api/v1/create_session", headers={"X-API-Key": "tml-other"}, json={}
        ).status_code
        == 401
    )
    with pytest.raises(tinker.RequestFailedError, match="this engine serves"):
        wait_for_sdk(service.create_lora_training_client(base_model="Qwen/Qwen3-8B"))


def test_fields_of_a_later_sdk_are_ignored_and_wrong_types_are_named(engine):
    """What the SDK will send one day must not break a client of today's engine."""
    headers = {"X-API-Key": engine.token}
    with httpx.Client(base_url=f"{engine.url}/api/v1", headers=headers) as client:

        def create(number, config):
            body = {"session_id": session, "model_seq_id": number, "base_model": engine.model}
            return client.post("/create_model", json={**body, "lora_config": config})

        session = client.post("/create_session", json={}).json()["session_id"]
        model = create(0, {"rank": 4, "seed": None, "alpha": 64, "dora": True}).json()
        made = client.post("/retrieve_future", json={"request_id": model["request_id"]}).json()
        assert made == {"model_id": model["model_id"]}
        info = client.post("/get_info", json={"model_id": model["model_id"]}).json()
        assert info["lora_rank"] == 4
        step = {
            "model_id": model["model_id"],
            "adam_params": {"learning_rate": 1e-4, "nesterov": False},
        }
        taken = client.post("/optim_step", json=step).json()
        assert "detail" not in taken, taken
        step["adam_params"]["nesterov"] = True
        refused = client.post("/optim_step", json=step)
        answer = refused.json()
        if "request_id" in answer:
            answer = client.post(
                "/retrieve_future", json={"request_id": answer["request_id"]}
            ).json()
        assert "adam_params has no nesterov" in str(answer)
        for number, (field, value) in enumerate({"rank": "8", "train_mlp": 1, "seed": 0.5}.items()):
            refused = create(1 + number, {"rank": 4, field: value})
            assert refused.status_code == 400
            assert f"lora_config.{field} is {value!r}" in refused.json()["detail"]


def test_capabilities_and_listing(service, training, engine):
    (model,) = service.get_server_capabilities().supported_models
    assert (model.model_name, model.max_context_length) == (engine.model, 512)
    path = training.save_state("listed").result().path
    training.save_weights_for_sampler("listed").result()
    rest = service.create_rest_client()
    run_id = path.removeprefix("tinker://").split("/")[0]
    found = {
        checkpoint.tinker_path: checkpoint.checkpoint_type
        for checkpoint in rest.list_checkpoints(run_id).result().checkpoints
    }
    assert found == {path: "training", path.replace("/weights/", "/sampler_weights/"): "sampler"}
    assert run_id in [
        run.training_run_id for run in rest.list_training_runs(limit=100).result().training_runs
    ]
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert path not in [
        checkpoint.tinker_path for checkpoint in rest.list_checkpoints(run_id).result().checkpoints
    ]


def test_a_checkpoint_is_published_and_made_private_again(service, training):
    """Each may be repeated; what is not there is refused at once."""
    path = training.save_state("published").result().path
    rest = service.create_rest_client()

    def is_public():
        checkpoints = rest.list_checkpoints(path.split("/")[2]).result().checkpoints
        return next(
            checkpoint.public for checkpoint in checkpoints if checkpoint.tinker_path == path
        )

    assert not is_public()
    for change, expected in (
        (rest.publish_checkpoint_from_tinker_path, True),
        (rest.unpublish_checkpoint_from_tinker_path, False),
    ):
        for _ in range(2):
            change(path).result()
            assert is_public() is expected
        with pytest.raises(tinker.BadRequestError, match="there is no checkpoint"):
            change(path.replace("published", "absent")).result(timeout=30)


def test_deleting_and_listing_take_no_time_even_where_a_record_is_damaged(
    service, training, engine
):
    """The SDK repeats what fails as a fault of the server for five minutes without a word."""
    rest = service.create_rest_client()
    path, damaged = (training.save_state(name).result().path for name in ("kept", "damaged"))
    run_id = path.split("/")[2]
    record = checkpoint_folder(engine, damaged) / "checkpoint.json"
    content = record.read_bytes()
    record.write_bytes(b"")
    with pytest.raises(tinker.BadRequestError, match="cannot be read"):
        rest.delete_checkpoint_from_tinker_path(damaged).result(timeout=30)
    listed = rest.list_checkpoints(run_id).result(timeout=30).checkpoints
    assert [one.tinker_path for one in listed] == [path]
    record.write_bytes(content)
    for one in (path, damaged):
        rest.delete_checkpoint_from_tinker_path(one).result(timeout=30)
    assert rest.list_checkpoints(run_id).result(timeout=30).checkpoints == []
    assert rest.get_training_run(run_id).result(timeout=30).last_checkpoint is None
    all_paths = [
        checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints().result(30).checkpoints
    ]
    assert not {path, damaged} & set(all_paths)


@needs_sdk("0.38", "downloads by its command")
def test_the_tinker_command_downloads_a_checkpoint(training, engine, tmp_path):
    """The vendor's command line gets a PEFT adapter from us."""
    path = training.save_state("download").result().path
    command = [
        sys.executable,
        "-m",
        "tinker.cli",
        "checkpoint",
        "download",
        path,
        "--output",
        str(tmp_path),
    ]
    env = {**os.environ, "TINKER_BASE_URL": engine.url, "TINKER_API_KEY": engine.token}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    (config,) = tmp_path.rglob("adapter_config.json")
    assert json.loads(config.read_text())["r"] == 8
    assert list(tmp_path.rglob("adapter_model.safetensors"))
