"""Whatever is said to rl_edit_config: the draft is what was accepted, and what was accepted can be
configured.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lachesis.agent_tools import launches
from lachesis.agent_tools.draft import edit_draft, select_environment
from lachesis.agent_tools.session import AgentSession
from lachesis.base.errors import LachesisError

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
    max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_an_edit_is_kept_whole_or_refused_whole(ask, desk, field, value):
    ask("rl_select_environment", name="arithmetic")
    before = desk.session_file.read()
    answer = ask("rl_edit_config", field=field, value=value)
    after = desk.session_file.read()
    if "code" in answer:
        assert answer["code"] in ("unknown_field", "locked_field", "field_value", "arguments")
        assert after == before
        return
    assert after.draft is not None
    (kept,) = after.draft.settings.values()
    assert kept == answer["value"] == answer["config"][answer["field"]]
    plan = ask("rl_start_training", dry_run=True)
    if (answer["field"], kept) == ("wandb_name", None):
        assert plan["config"]["wandb_name"].startswith("arithmetic-"), "a run always has a name"
    elif "problem" in answer:
        assert plan["code"] == "field_value"
        assert plan["error"] == answer["problem"]
    else:
        assert plan["config"][answer["field"]] == answer["value"]


def test_validators_of_the_environment_itself_count_at_edit_time(home, monkeypatch):
    """What its JSON schema cannot say is asked in its own process."""
    folder = home / "envs"
    folder.mkdir()
    (folder / "even.py").write_text(
        "from atroposlib.envs.base import BaseEnv, BaseEnvConfig\n"
        "from pydantic import Field, field_validator, model_validator\n"
        "class Config(BaseEnvConfig):\n"
        "    group_size: int = Field(8, ge=8)\n"
        "    low: int = 1\n"
        "    high: int = 5\n"
        "    @model_validator(mode='after')\n"
        "    def ordered(self):\n"
        "        if self.low > self.high: raise ValueError('low must not be above high')\n"
        "        return self\n"
        "    width: int = 2\n"
        "    @field_validator('width')\n"
        "    @classmethod\n"
        "    def even(cls, value):\n"
        "        if value % 2: raise ValueError('width must be even')\n"
        "        return value\n"
        "class Even(BaseEnv):\n"
        "    name = 'even'\n"
        "    env_config_cls = Config\n"
        "    @classmethod\n"
        "    def config_init(cls): return Config(), []\n"
    )
    monkeypatch.setenv("LACHESIS_ENVIRONMENTS", str(folder))
    desk = AgentSession("test")
    select_environment(desk, "even", model="tiny")
    with pytest.raises(LachesisError, match="width must be even"):
        edit_draft(desk, "width", 3)
    assert edit_draft(desk, "width", 4)["value"] == 4
    assert launches.preview_start(desk)["config"]["width"] == 4
    with pytest.raises(LachesisError, match="minimum of 8"):
        edit_draft(desk, "group_size", 4)  # the class is narrower than every environment must be
    assert edit_draft(desk, "low", 9)["problem"] == "low must not be above high"
    with pytest.raises(LachesisError, match="low must not be above high"):
        launches.preview_start(desk)
    assert "problem" not in edit_draft(desk, "high", 10)
