"""Whatever is said to rl_edit_config: the draft is what was accepted, and what was accepted can be
configured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lachesis.agent.session import AgentSession
from lachesis.base.json_text import Json

NAMES = [
    "group_size",
    "batch_size",
    "env.total_steps",
    "learning_rate",
    "tinker.seed",
    "loss_fn",
    "largest",
    "held_out_share",
    "wandb_name",
    "use_wandb",
    "eval_handling",
    "rollout_server_url",
    "openai.weight",
    "steps_per_eval",
]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([0, 1, 2, 8, 16, 0.5, "ppo", "NONE", "STOP_TRAIN"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(field=st.sampled_from(NAMES) | st.text(), value=values)
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_an_edit_is_kept_whole_or_refused_whole(
    ask: Callable[..., Json], desk: AgentSession, field: str, value: Any
) -> None:
    ask("rl_select_environment", name="arithmetic")
    before = desk.session_file.read()
    answer = ask("rl_edit_config", field=field, value=value)
    after = desk.session_file.read()
    if "code" in answer:
        assert answer["code"] in ("unknown_field", "locked_field", "field_value", "arguments")
        assert after == before
        return
    assert after.draft is not None
    (kept,) = after.draft.edits.values()
    assert kept == answer["value"] == answer["config"][answer["field"]]
    plan = ask("rl_start_training", dry_run=True)
    if (answer["field"], kept) == ("wandb_name", None):
        assert plan["config"]["wandb_name"].startswith("arithmetic-"), "a run always has a name"
    elif "problem" in answer:
        assert plan["code"] == "field_value"
        assert plan["error"] == answer["problem"]
    else:
        assert plan["config"][answer["field"]] == answer["value"]
