"""Groups that are lost because the environment raises while it scores them."""

from lachesis.monitor.learning_rules import judge_learning
from lachesis.monitor.reward_trend import WINDOW
from lachesis.monitor.run_history import RunFacts
from tests.monitor.test_learning import healthy


def test_groups_in_whose_scoring_the_environment_raises_are_lost_rollouts():
    """A verifier that breaks half-way; the other groups are still trained on."""
    lost = [
        {**step, "rollouts/raised": 8.0, "step": 60 + step["step"]} for step in healthy(WINDOW, 1)
    ]
    facts = RunFacts(group_size=16, batch_size=128, environment_counts={"errors": {"E: x": 160}})
    health = judge_learning(healthy(60) + lost, facts=facts)
    assert health.word == "suspect"
    assert health.evidence[0] == (
        "50% of the rollouts of the last 20 steps had no usable score, since step 61 (E: x, 160 "
        "times)"
    )
    now_and_then = [{**step, "rollouts/raised": float(step["step"] == 30)} for step in healthy(60)]
    assert judge_learning(now_and_then, facts=facts).word == "healthy"
