"""Loss and accuracy of a completed run are always known."""

from lachesis.reporting.run_schemas import summarize_last_steps
from lachesis.runs.held_out_results import HeldOutPoint


def test_the_newest_held_out_accuracy_counts():
    steps = [{"step": 1, "train/loss": 0.5, "train/percent_correct": 1.0}]
    curve = [HeldOutPoint(step=0, percent_correct=0.1), HeldOutPoint(step=1, percent_correct=0.4)]
    assert summarize_last_steps(steps, curve) == {
        "loss": 0.5,
        "accuracy": 0.4,
        "accuracy_source": "held-out items",
    }


def test_without_an_evaluation_the_rollouts_of_training_count():
    steps = [
        {"step": 1, "train/loss": -0.25, "train/percent_correct": 0.2},
        {"step": 2, "train/percent_correct": 0.6},
    ]
    before = [HeldOutPoint(step=0, percent_correct=0.9)]
    assert summarize_last_steps(steps, before) == {
        "loss": -0.25,
        "accuracy": 0.4,
        "accuracy_source": "rollouts of training",
    }


def test_a_run_without_a_gradient_has_no_loss_to_speak_of():
    summary = summarize_last_steps([{"step": 1, "train/percent_correct": 1.0}], [])
    assert (summary["loss"], summary["accuracy"]) == (0.0, 1.0)
    assert summarize_last_steps([], [])["loss"] is None
