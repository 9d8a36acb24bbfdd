"""The tool and the route that return what the model answered in training."""

from lachesis.base.json_text import to_compact_json
from tests.harness.home import make_row, write_run


def test_rl_get_rollouts(ask, store):
    failed = make_row(2, 1, 1, 0.5, outcome="invalid", reason="the verifier failed")
    rows = [make_row(1, 0, 0, 1.0), make_row(2, 1, 0, 0.0, answer="x" * 3000), failed]
    write_run(store, rollouts=rows)
    answer = ask("rl_get_rollouts", run_id="0123abcd")
    assert [row["score"] for row in answer["rollouts"]] == [0.0, 1.0]
    cut = answer["rollouts"][0]
    assert cut["answer"] == f"{'x' * 1000} … (1,000 more characters) … {'x' * 1000}"
    assert cut["truncated_fields"] == ["answer"]
    assert "truncated_fields" not in answer["rollouts"][1]
    assert answer["message"] == "2 of 2 rollouts that match; kept are those of steps 1 to 2"
    (best,) = ask("rl_get_rollouts", run_id="0123abcd", order="best", limit=1)["rollouts"]
    assert (best["step"], best["prompt"]) == (1, "0+1=")
    (invalid,) = ask("rl_get_rollouts", run_id="0123abcd", order="invalid")["rollouts"]
    assert invalid["reason"] == "the verifier failed"
    assert ask("rl_get_rollouts", run_id="0123abcd", item="key1", step=-1)["rollouts"]
    assert ask("rl_get_rollouts", run_id="00000000")["code"] == "unknown_run"
    assert ask("rl_get_rollouts", run_id="0123abcd", limit=0)["code"] == "arguments"
    assert "steps 1 to 2" in ask("rl_get_rollouts", run_id="0123abcd", step=9)["error"]


def test_a_hundred_long_answers_come_in_pages(ask, store):
    rows = [make_row(1, 0, number, 0.0, answer=f"{number} {'ü' * 5000}") for number in range(100)]
    write_run(store, rollouts=rows)
    numbers: list[int] = []
    cursor: int | None = 0
    while cursor is not None:
        answer = ask("rl_get_rollouts", run_id="0123abcd", order="first", limit=100, cursor=cursor)
        assert len(to_compact_json(answer).encode()) <= 40_000
        numbers += [int(row["answer"].split()[0]) for row in answer["rollouts"]]
        cursor = answer.get("next_cursor")
    assert numbers == list(range(100))
