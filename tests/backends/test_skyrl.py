"""Whole runs on SkyRL's JAX engine without a card, from PyPI's packages: `make backends`."""

import json
import os
import signal
import statistics

import pytest

from lachesis.runs.metrics import MetricsFile
from tests.backends.conftest import ADDRESSES, HOSTS, RAY_PORT, list_workers, start_ray

pytestmark = [pytest.mark.backends, pytest.mark.timeout(3000)]
NUM_STEPS, STOPPED_AT = 100, 12
FIELDS = {
    "backend": "skyrl",
    "total_steps": NUM_STEPS,
    "learning_rate": 0.0015,
    "max_token_length": 128,
    "max_token_trainer_length": 512,
    "max_num_workers": 64,
    "save_checkpoint_interval": 10,
    "steps_per_eval": 25,
    "final_evaluation": "true",
    "use_wandb": "false",
}
# A loaded machine compiles each new shape for many seconds.
START_S, TRAINING_S = 300, 900


def start(place, *more, **fields):
    options = [
        part
        for name, value in {**FIELDS, **fields}.items()
        for part in ("--set", f"{name}={value}")
    ]
    answer = place.cli(
        "train", "arithmetic", "--profile", "custom", "--without-validation", *options, *more
    )
    return place.load(answer["run_id"])


def read_rewards(place, run_id):
    metrics = MetricsFile(place.store.dir(run_id).metrics).read()
    return [float(step["reward/mean"]) for step in metrics]


def has_steps(place, number):
    return lambda record: len(read_rewards(place, record.run_id)) >= number


def check_whole_life(place, tmp_path, **fields):
    """Train, stop, resume, train to the end, hand over the weights, and go on from them."""
    run = start(place, "--model", "tiny", **fields)
    place.wait_for_run(run.run_id, lambda record: record.status == "running", START_S)
    place.wait_for_run(run.run_id, has_steps(place, STOPPED_AT), TRAINING_S)
    place.cli("stop", run.run_id)
    place.wait_for_run(run.run_id, lambda record: record.status == "stopped", 120)
    num_stopped = len(read_rewards(place, run.run_id))
    assert STOPPED_AT <= num_stopped < NUM_STEPS
    place.cli("resume", run.run_id)
    record = place.wait_for_run(run.run_id, lambda record: record.status == "completed", TRAINING_S)
    assert record.attempt == 2
    rewards = read_rewards(place, run.run_id)
    assert len(rewards) == NUM_STEPS
    first, last = statistics.mean(rewards[:5]), statistics.mean(rewards[-5:])
    print(f"reward {first:.3f} -> {last:.3f} in {NUM_STEPS} steps")
    assert first <= 0.35
    assert last >= 0.6
    results = place.cli("status", run.run_id)
    print(json.dumps(results.get("evaluation") or results.get("held_out"))[:300])
    exported = place.cli("export", run.run_id, "--to", str(tmp_path / "weights"))
    assert exported["verified"] is True
    assert exported["verified_by"] == "this machine"
    print("weights:", json.dumps(exported["parity"])[:200])
    later = start(place, "--from", f"{run.run_id}@last", **{**fields, "total_steps": 3})
    place.wait_for_run(later.run_id, lambda record: record.status == "completed", TRAINING_S)
    assert statistics.mean(read_rewards(place, later.run_id)) >= 0.45


def test_a_run_on_one_process(make_place, tmp_path):
    place = make_place()
    with place.served():
        check_whole_life(place, tmp_path)


@pytest.mark.usefixtures("two_hosts")
def test_a_run_on_two_hosts(make_place, skyrl, tmp_path):
    """Ray runs on both hosts; the engine of the run has a process on each."""
    settings = {
        "use_ray": True,
        "num_processes": 2,
        "fully_sharded_data_parallel_size": 2,
        "ray_actor_options": {"num_cpus": 1},
    }
    on_first_host = ("ip", "netns", "exec", HOSTS[0])
    with start_ray(skyrl, tmp_path):
        place = make_place(on_first_host, RAY_ADDRESS=f"{ADDRESSES[0]}:{RAY_PORT}")
        with place.served():
            config = json.dumps(settings)
            run = start(place, "--model", "tiny", total_steps=3, backend_config=config)
            place.wait_for_run(run.run_id, lambda record: record.status == "running", START_S)
            workers = [list_workers(host) for host in HOSTS]
            print("workers:", workers)
            assert all(workers)
            place.wait_for_run(run.run_id, lambda record: record.status == "completed", TRAINING_S)
            check_whole_life(place, tmp_path, backend_config=config)


def test_ray_that_the_engine_has_started_is_ended(make_place):
    """Its daemons outlive a server that is killed; the end of the run takes them along."""
    place = make_place()
    with place.served():
        settings = {"use_ray": True, "num_processes": 1, "ray_actor_options": {"num_cpus": 1}}
        run = start(place, "--model", "tiny", backend_config=json.dumps(settings))
        place.wait_for_run(run.run_id, lambda record: record.status == "running", START_S)
        commands = place.processes().values()
        daemons = [command for command in commands if "raylet" in command or "gcs" in command]
        print(len(daemons), "of Ray's daemons")
        assert daemons
        pid = place.load(run.run_id).services["backend"].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        place.wait_until_ended(run.run_id, 60)
        assert "backend was killed by signal 9" in (place.load(run.run_id).error or "")
        left = place.processes(place.store.dir(run.run_id).path)
        assert left == {}, left
