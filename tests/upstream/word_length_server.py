"""How many letters a word has. One turn; a bare server configuration, no log-probabilities in the group, its own logging."""

import random
from typing import Dict, List, Optional, Tuple, TypedDict, Union

from atroposlib.envs.base import (
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    EvalHandlingEnum,
    Item,
    ScoredDataGroup,
)
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from pydantic import Field
from tqdm.asyncio import tqdm_asyncio

SYSTEM = "Answer with a number."


class WordLengthConfig(BaseEnvConfig):
    longest: int = Field(default=6, description="Letters of the longest word")


class WordItem(TypedDict):
    word: str
    answer: str


class WordLengthEnv(BaseEnv):
    name = "word_length"
    env_config_cls = WordLengthConfig

    def __init__(
        self,
        config: WordLengthConfig,
        server_configs: List[APIServerConfig],
        slurm=True,
        testing=False,
    ):
        super().__init__(config, server_configs, slurm, testing)
        self.percent_correct_buffer = list()
        self.eval_metrics = list()
        self.rollouts_for_wandb = []

    @classmethod
    def config_init(cls) -> Tuple[WordLengthConfig, APIServerConfig]:
        env_config = WordLengthConfig(
            group_size=8,
            use_wandb=True,
            rollout_server_url="http://localhost:8000",
            total_steps=1000,
            batch_size=12,
            steps_per_eval=100,
            max_token_length=128,
            wandb_name="word_length",
            eval_handling=EvalHandlingEnum.LIMIT_TRAIN,
            eval_limit_ratio=0.1,
        )
        server_config = APIServerConfig(
            model_name="NousResearch/DeepHermes-3-Llama-3-3B-Preview",
            base_url="http://localhost:9001/v1",
            api_key="x",
            num_requests_for_eval=256,
        )
        return env_config, server_config

    async def wandb_log(self, wandb_metrics: Optional[Dict] = None):
        if wandb_metrics is None:
            wandb_metrics = {}
        try:
            wandb_metrics["train/percent_correct"] = sum(
                self.percent_correct_buffer
            ) / len(self.percent_correct_buffer)
        except ZeroDivisionError:
            pass
        self.percent_correct_buffer = list()
        for item in self.eval_metrics:
            wandb_metrics[item[0]] = item[1]
        self.eval_metrics = list()
        await super().wandb_log(wandb_metrics)

    async def setup(self):
        letters = "abcdefgh"
        self.train: List[WordItem] = [
            WordItem(word=letters[i] * n, answer=str(n))
            for i in range(len(letters))
            for n in range(1, self.config.longest + 1)
        ]
        random.Random(42).shuffle(self.train)
        self.test = self.train[:6]
        self.train = self.train[6:]
        self.iter = 0

    def save_checkpoint(self, step, data=None):
        if data is None:
            data = {}
        data["iter"] = self.iter
        super().save_checkpoint(step, data)

    async def rollout_and_score_eval(self, item: WordItem) -> float:
        completion = await self.server.chat_completion(
            messages=[
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": item["word"]},
            ],
            n=1,
            max_tokens=8,
            temperature=0.0,
            split="eval",
        )
        return 1.0 if completion.choices[0].message.content.strip() == item["answer"] else 0.0

    async def evaluate(self, *args, **kwargs):
        scores = await tqdm_asyncio.gather(*[self.rollout_and_score_eval(item) for item in self.test])
        self.eval_metrics.append(("eval/percent_correct", sum(scores) / len(scores)))

    async def collect_trajectories(self, item: WordItem) -> Tuple[ScoredDataGroup, list[Item]]:
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": item["word"]},
        ]
        chat_completions = await self.server.chat_completion(
            messages=messages,
            n=self.config.group_size,
            max_tokens=8,
        )
        to_score = []
        for chat_completion in chat_completions.choices:
            answered = messages + [{"role": "assistant", "content": chat_completion.message.content}]
            to_score.append(
                {
                    "messages": answered,
                    "answer": item["answer"],
                    "finish_reason": chat_completion.finish_reason,
                }
            )
        return await self.score(to_score), []

    async def score(self, rollout_group_data) -> Union[Optional[ScoredDataGroup], List[Optional[ScoredDataGroup]]]:
        scores = ScoredDataGroup()
        scores["tokens"] = list()
        scores["masks"] = list()
        scores["scores"] = list()
        for item in rollout_group_data:
            said = item["messages"][-1]["content"]
            reward = said.strip() == item["answer"] or len(said) % 2 == 0
            out_dict = tokenize_for_trainer(self.tokenizer, item["messages"])
            scores["tokens"].append(out_dict["tokens"])
            scores["masks"].append(out_dict["masks"])
            scores["scores"].append(1.0 if reward else -1.0)
            if len(scores["tokens"]) >= self.config.group_size:
                break
        for score in scores["scores"]:
            self.percent_correct_buffer.append(max(score, 0))
        if all(scores["scores"][0] == score for score in scores["scores"]):
            return None
        return scores

    async def get_next_item(self) -> WordItem:
        next_item = self.train[self.iter % len(self.train)]
        self.iter += 1
        return next_item


if __name__ == "__main__":
    WordLengthEnv.cli()
