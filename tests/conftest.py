"""Fixtures: a home of its own, free ports, real child processes, a random tiny model and a real
engine that serves it.
"""

import gc
import os
import signal

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from lachesis.tiny_model import build
from tests.harness.command_line import answer, shown  # noqa: F401
from tests.harness.home import (  # noqa: F401
    endpoint,
    new_home,
    schemas,
    share_schemas,
    shared_folder,
    store,
    tiny_model,
)
from tests.harness.prefect_server import empty_database  # noqa: F401
from tests.harness.processes import api, engine, start_engine  # noqa: F401

# what all tests import stays; looking through it for garbage takes half of the time
gc.disable()
# a shell's background job ignores it, and so would children
signal.signal(signal.SIGINT, signal.default_int_handler)
# a slow example is no fault: the machine may be busy
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
os.environ["TINKER_TELEMETRY"] = "0"
# more threads than cores, of several engines, wait for each other twenty times longer
os.environ["OMP_NUM_THREADS"] = "1"
# an accidental server fails instead of starting
os.environ["PREFECT_SERVER_EPHEMERAL_ENABLED"] = "false"
# the developer's keys stay where they are
os.environ["HERMES_HOME"] = "/nonexistent"
os.environ["PYTHON_KEYRING_BACKEND"] = "keyring.backends.null.Keyring"
SAME_WORKER = {
    "tests/e2e/test_monitoring.py": "tests/e2e/test_agents.py",
    "tests/e2e/test_mixture.py": "tests/e2e/test_lifecycle.py",
    "tests/e2e/test_prefect_pages.py": "tests/e2e/test_lifecycle.py",
    "tests/e2e/test_deployments.py": "tests/e2e/test_lifecycle.py",
    "tests/prefect_client/test_registered_deployments.py": "tests/prefect_client/test_runner.py",
    "tests/prefect_client/test_worker.py": "tests/prefect_client/test_runner.py",
    "tests/trainer/test_pushed_weights.py": "tests/trainer/test_weights.py",
}
"""Modules that run in the worker of another module, because a launcher or a training of their own
costs a minute.
"""
# These share the engine of a worker in the same way; each further one takes five seconds of a core.
SAME_WORKER |= {
    f"tests/engine/test_{name}.py": "tests/engine/test_contract.py"
    for name in ("model_thread", "questions", "sampling", "training_contract")
} | {
    f"tests/{name}.py": "tests/inference_server/test_answers.py"
    for name in (
        "inference_server/test_fuzz",
        "inference_server/test_parameters",
        "supervision/test_leftovers",
        "trainer/test_accounts",
        "trainer/test_checkpoint_saving",
        "trainer/test_failed_steps",
        "trainer/test_loop",
        "trainer/test_recompute_logprobs",
        "trainer/test_sft_examples",
        "trainer/test_trained_model",
        "trainer/test_trainer_process",
        "weight_agreement/test_at_weight_sync",
    )
}


class ScopeScheduling(LoadScopeScheduling):
    """Give a worker whole modules, and those of `SAME_WORKER` together."""

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        return SAME_WORKER.get(scope, scope)


def pytest_collection_finish():
    """Collect the garbage of the tests only."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)  # there is none with `-p no:xdist`
def pytest_xdist_make_scheduler(config, log):
    """Use this scheduling where `--dist loadscope` asks for the one that it extends."""
    return ScopeScheduling(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.fixture(autouse=True)
def clean_environment(
    tmp_path_factory,
    schemas,  # noqa: F811
    monkeypatch,
):
    """Every test has its own home and none of the developer's keys."""
    home = tmp_path_factory.mktemp("home")
    share_schemas(home, schemas)
    for name in list(os.environ):
        if name.startswith(("TINKER_API", "TINKER_BASE", "WANDB_", "PREFECT_API", "LACHESIS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LACHESIS_HOME", str(home))
    # What needs a server is refused, unless a test starts one.
    monkeypatch.setenv("LACHESIS_NO_SERVE", "1")
    return home


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """A two-layer model with random weights."""
    return str(
        build.ensure_tiny_model(build.TinyModelRecipe(steps=0), tmp_path_factory.mktemp("random"))
    )
