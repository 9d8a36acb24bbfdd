"""Single answers: items, the three outcomes of a verifier, evaluation."""

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from lachesis.environment import DatasetError, Item, Outcome, TaskEnv, zero
from lachesis.environment_process import model_free_check
from lachesis.environment_toolkit import scoring
from lachesis.environment_toolkit.single_turn import Rollout
from tests.environment_toolkit.conftest import without_place
from tests.environment_toolkit.words import Words


@pytest.mark.parametrize(
    ("said", "reward", "reason"),
    [
        ("half", 0.5, None),
        ("parts", 0.75, None),
        ("later", 0.75, None),
        ("zero", 0.0, "it rambles"),
        ("nan", None, "the score is nan"),
        ("string", None, "the score is a str, not a number"),
        ("none", None, "the score is None"),
        ("nan part", None, "the score form is nan"),
        ("raises", None, "the verifier raised KeyError somewhere: 'answer'"),
        ("invalid", None, "the judge is away"),
        ("hangs", None, "the verifier was not done after 0.3 s"),
    ],
)
async def test_what_a_verifier_does_is_one_of_three_outcomes(made, generator, said, reward, reason):
    env = made(Words, verifier_timeout_s=0.3)
    await env.setup()
    generator.say = lambda prompt, n: [said, *["other"] * (n - 1)]
    first, *others = await env.sample_rollouts(env.items.train[0], 4)
    assert (first.outcome.reward, without_place(first.outcome.reason)) == (reward, reason)
    assert [other.outcome for other in others] == [Outcome(0.0)] * 3, "its neighbours are scored"


async def test_one_that_hangs_amid_others_costs_its_own_score_alone(made, generator):
    env = made(Words, verifier_timeout_s=0.3)
    await env.setup()
    generator.say = lambda prompt, n: ["half", "hangs", "raises", "later", "hangs"]
    rollouts = await env.sample_rollouts(env.items.train[0], 5)
    assert [rollout.outcome.reward for rollout in rollouts] == [0.5, None, None, 0.75, None]


async def test_what_a_coroutine_scores_is_scored_at_once(made, generator):
    """Each waits for all the others."""
    together = asyncio.Barrier(4)

    class Judged(Words):
        async def score_answer(self, item: Item, answer: str) -> float:
            await together.wait()
            return 0.5

    env = made(Judged, verifier_timeout_s=5.0)
    await env.setup()
    rollouts = await env.sample_rollouts(env.items.train[0], 4)
    assert [rollout.outcome for rollout in rollouts] == [Outcome(0.5)] * 4


async def test_a_verifier_that_never_ends_is_given_up_after_a_while(made, generator):
    env = made(Words, verifier_timeout_s=0.02)
    await env.setup()
    generator.say = lambda prompt, n: ["hangs"] * n
    rollouts = await env.sample_rollouts(env.items.train[0], 12)
    reasons = [rollout.outcome.reason for rollout in rollouts]
    assert reasons[0] == "the verifier was not done after 0.02 s"
    assert (
        reasons[-1]
        == "too many calls of the verifier have not returned; no further call is made until one "
        "does"
    )


async def test_the_check_without_a_model_scores_as_training_does(made):
    """Also where only score_rollout() was written."""

    class Short(TaskEnv):
        def load_dataset(self) -> list[Item]:
            return [{"question": f"say {number}"} for number in range(9)]

        def gold(self, item: Item) -> str:
            return "ok"

        def corrupt(self, item: Item) -> str:
            return "much too long"

        def score_rollout(self, item: Item, rollout: Rollout) -> float:
            return float(rollout.sampled_tokens <= 3)

    env = made(Short)
    await env.setup()
    found = await model_free_check._check_without_model({"env": env, "items": env.items.train[:3]})
    assert (found["offered"], found["gold_right"], found["corrupt_wrong"], found["faults"]) == (
        True,
        3,
        3,
        [],
    )


@pytest.mark.parametrize(
    ("said", "outcomes"),
    [
        ("rank", [Outcome(0.5), Outcome(0.0), Outcome(1.0)]),
        ("one", [Outcome(None, reason="score_group() returned 1 values for 3 rollouts")] * 3),
        ("none", [Outcome(None, reason="score_group() returned a NoneType for 3 rollouts")] * 3),
        ("raises", [Outcome(None, reason="the verifier raised KeyError somewhere: 'x'")] * 3),
        (
            "nan",
            [
                Outcome(1.0),
                Outcome(None, reason="the score is nan"),
                Outcome(0.0, reason="too plain"),
            ],
        ),
    ],
)
async def test_answers_can_be_scored_beside_each_other(made, generator, said, outcomes):
    class Longest(Words):
        async def score_group(self, item: Item, rollouts: Any) -> Any:
            ranked = sorted(rollout.answer for rollout in rollouts)
            kinds = {"one": [1.0], "none": None, "nan": [1.0, float("nan"), zero("too plain")]}
            if said == "raises":
                raise KeyError("x")
            return (
                kinds[said]
                if said in kinds
                else [ranked.index(rollout.answer) / 2 for rollout in rollouts]
            )

    env = made(Longest)
    await env.setup()
    generator.say = lambda prompt, n: ["b", "a", "c"]
    rollouts = await env.sample_rollouts(env.items.train[0], 3)
    assert [
        replace(rollout.outcome, reason=without_place(rollout.outcome.reason))
        for rollout in rollouts
    ] == outcomes


async def test_a_slow_verifier_is_asked_again_once_its_calls_have_ended(made, generator):
    env = made(Words, verifier_timeout_s=0.02)
    await env.setup()

    def slow(item, rollout):
        time.sleep(0.5)
        return 1.0

    reasons = [(await env.score_safely(slow, {}, None)).reason for _ in range(12)]
    assert "no further call is made" in str(reasons[-1])
    await asyncio.sleep(0.7)
    assert (await env.score_safely(lambda item, rollout: 0.5, {}, None)) == Outcome(0.5)


async def test_a_time_out_of_the_verifiers_own_is_an_error_like_others(made):
    env = made(Words)
    await env.setup()

    def away(item):
        raise TimeoutError("the judge did not answer")

    for _ in range(12):
        reason = without_place((await env.score_safely(away, {})).reason)
        assert reason == "the verifier raised TimeoutError somewhere: the judge did not answer"


async def test_waiting_for_samples_or_for_a_turn_is_not_the_verifiers_time(made):
    env = made(Words, verifier_timeout_s=0.3)
    await env.setup()

    async def waits(item):
        with scoring.pause_timeout():
            await asyncio.sleep(0.5)
        await asyncio.sleep(0.1)
        return 1.0

    async def hangs(item):
        with scoring.pause_timeout():
            await asyncio.sleep(0.1)
        await asyncio.sleep(5)
        return 1.0

    assert await env.score_safely(waits, {}) == Outcome(1.0)
    assert (await env.score_safely(hangs, {})).reason == "the verifier was not done after 0.3 s"


async def test_items_come_in_an_order_that_a_resumed_run_repeats(made):
    env, again = made(Words, data_seed=3), made(Words, data_seed=3)
    await env.setup()
    await again.setup()
    count = len(env.items.train)
    first = [await env.get_next_item() for _ in range(2 * count)]
    again.seek(count + 2)
    assert [await again.get_next_item() for _ in range(count - 2)] == first[count + 2 :]
    names = [one["answer"] for one in first]
    assert sorted(names[:count]) == sorted(names[count:]), "each pass holds every item"
    assert names[:count] != names[count:], "in an order of its own"
    assert not {one["answer"] for one in env.items.held_out} & set(names)


async def test_a_place_is_kept_for_atropos_own_checkpoints(made, tmp_path):
    env, again = made(Words), made(Words)
    for one in (env, again):
        await one.setup()
        one.checkpoint_dir, one.wandb_prepend = str(tmp_path), "words_0"
    for _ in range(5):
        await env.get_next_item()
    env.save_checkpoint(4)
    again.curr_step = 4
    again.load_checkpoint()
    assert await again.get_next_item() == await env.get_next_item()


async def test_an_evaluation_asks_the_held_out_items_and_counts(made, generator, tmp_path):
    env = made(Words, eval_samples=2, data_dir_to_save_evals=str(tmp_path), verifier_timeout_s=5)
    await env.setup()
    questions = {one["question"]: one["answer"] for one in env.items.held_out}
    assert questions
    asked: list[str] = []

    def say(prompt, n):
        question = prompt.partition("<|user|>")[2].partition("<|end|>")[0]
        asked.append(question)
        return [questions[question], "nan"] if len(asked) > 1 else [questions[question], "half"]

    generator.say = say
    await env.evaluate()
    assert sorted(asked) == sorted(questions)
    metrics = json.loads((tmp_path / "metrics.json").read_text())["results"]["all"]
    count = len(questions)
    assert metrics["eval/percent_correct"] == pytest.approx(count / (count + 1))
    assert metrics["eval/invalid"] == pytest.approx((count - 1) / (2 * count))
    assert metrics["eval/pass@1"] == pytest.approx((count - 0.5) / count)
    assert metrics["eval/unanswered"] == 0
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * count
    assert {line["model_answer"] for line in lines} >= {"half", "nan"}


async def test_a_tokenizer_without_a_chat_template_gets_a_plain_one(made, generator):
    env = made(Words)
    env.tokenizer.chat_template = None
    await env.setup()
    (one,) = await env.sample_rollouts({"question": "why", "answer": "ok"}, 1)
    assert env.tokenizer.decode(one.tokens) == "user: why\nassistant: ok<|end|>"


async def test_a_prompt_that_leaves_no_room_is_told_by_name(made):
    env = made(Words, max_token_length=30)
    await env.setup()
    with pytest.raises(Exception, match="the prompt has 53 tokens; max_token_length is 30"):
        await env.sample_rollouts({"question": "x" * 50, "answer": ""}, 4)


async def test_a_server_that_fails_costs_the_group_and_no_more(made, generator):
    env = made(Words)
    await env.setup()
    generator.say = lambda prompt, n: ["!500"]
    with pytest.raises(Exception, match=r"RetryError|500"):
        await asyncio.wait_for(env.collect_trajectories(env.items.train[0]), 60)


@pytest.mark.parametrize(
    ("items", "said"), [([], "has 0 different"), ([{"question": "a"}] * 3, "has 1 different")]
)
async def test_a_data_set_that_is_too_small_is_told(made, items, said):
    class Few(Words):
        def load_dataset(self) -> list[Item]:
            return items

    with pytest.raises(DatasetError, match=said):
        await made(Few).setup()
