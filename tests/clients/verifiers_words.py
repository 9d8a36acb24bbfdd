"""Environments for `verifiers`, as its users write them: one answer, several turns, tools."""

import verifiers as vf
from datasets import Dataset


def load_environment(kind="single", count=40):
    rows = [
        {"question": f"reverse {number}", "answer": str(number)[::-1]}
        for number in range(10, 10 + count)
    ]
    dataset = Dataset.from_list(rows)
    return {"single": single, "turns": turns, "tools": tools, "group": group}[kind](dataset)


def text(completion):
    return completion[-1]["content"] if completion else ""


def right(completion, answer, **kwargs):
    if "bug" in text(completion):
        raise KeyError("a fault of the function")
    return float(text(completion).strip() == answer)


def short(completion):
    return 1.0 if len(text(completion)) < 5 else 0.0


def single(dataset):
    return vf.SingleTurnEnv(
        dataset=dataset,
        eval_dataset=dataset.select(range(5)),
        rubric=vf.Rubric(funcs=[right, short], weights=[1.0, 0.25]),
    )


def tools(dataset):
    def backwards(word: str) -> str:
        """Write a word backwards."""
        return word[::-1]

    return vf.ToolEnv(
        dataset=dataset, tools=[backwards], rubric=vf.Rubric(funcs=[right]), max_turns=3
    )


class Turns(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "sure?"}]


def turns(dataset):
    return Turns(dataset=dataset, rubric=vf.Rubric(funcs=[right]), max_turns=2)


def group(dataset):
    def best(completions, **kwargs):
        lengths = [len(text(completion)) for completion in completions]
        return [float(length == max(lengths)) for length in lengths]

    return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[best]))
