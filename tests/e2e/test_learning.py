"""A real run on the real chain: it learns, and its weights can be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lachesis.models import tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


def test_a_model_learns_and_is_handed_over(
    agent: Callable[..., Any],
    cli: Callable[..., Any],
    wait_ended: Callable[[str], None],
    start_engine: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """By an agent over MCP that is killed between every two calls: reward and held-out accuracy rise, every process ends well,
    and PEFT samples like the engine."""

    def call(tool: str, /, **arguments: Any) -> Any:
        return agent("stdio", tool, {}, **arguments)

    names = [one["name"] for one in call("rl_list_environments")["environments"]]
    call("rl_select_environment", name=names[names.index("arithmetic")])
    for field, value in (("total_steps", 60), ("seed", 1)):
        call("rl_edit_config", field=field, value=value)
    run_id = call("rl_start_training")["run_id"]
    wait_ended(run_id)
    results = call("rl_get_results", run_id=run_id)
    assert results["status"] == "completed", results
    assert results["reward"]["first"] <= 0.35
    assert results["reward"]["last"] >= 0.5
    assert results["held_out"]["after"] >= results["held_out"]["before"] + 0.35
    assert results["final_metrics"]["step"] == 60
    assert len(results["history"]) == 10
    assert Path(results["wandb_dir"]).is_dir(), "without a key W&B's files are local"
    told = cli("results", run_id)
    assert {**told, "next_steps": results["next_steps"]} == results, "every surface says the same"
    status = cli("status", run_id)
    assert status["processes"]["trainer"] == "exited (0)"
    assert set(status["processes"]) == {"engine", "api", "trainer", "env"}
    assert {row["run_id"]: row["status"] for row in cli("runs")["runs"]}[run_id] == "completed"
    _check_weights(cli("weights", run_id, "--to", str(tmp_path / "adapter")), results, start_engine)
    refused = cli("weights", run_id, "--to", str(tmp_path / "adapter"), expect=1)
    assert refused["code"] == "run_state"


def _check_weights(note: dict[str, Any], results: dict[str, Any], start_engine: Callable[..., Any]) -> None:
    """An engine on the run's checkpoints, asked through the SDK, against PEFT on the export."""
    store = Path(results["weights"]["adapter"]).parents[2]
    engine = start_engine(results["base_model"], store)
    prompt = tokenizer().encode("<|user|>3+4=<|end|><|assistant|>7<|end|>")
    with tinker.ServiceClient(base_url=engine.url, api_key=engine.token) as service:
        sampler = service.create_sampling_client(model_path=results["weights"]["sampler_weights"]).result()
        served = sampler.compute_logprobs(tinker.ModelInput.from_ints(prompt)).result()[1:]
    base = AutoModelForCausalLM.from_pretrained(note["base_model"], dtype=torch.float32)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, note["path"]).eval()(torch.tensor([prompt])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1)[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    np.testing.assert_allclose(np.array(served, dtype=np.float64), expected.numpy(), atol=1e-3)
