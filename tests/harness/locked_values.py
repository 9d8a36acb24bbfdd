"""The values that the contract locks on profile `tinker` (its section 3)."""

from typing import Any

LOCKED_VALUES: dict[str, dict[str, Any]] = {
    "env": {
        "tokenizer_name": "Qwen/Qwen3-8B",
        "rollout_server_url": "http://localhost:8000",
        "use_wandb": True,
        "max_token_length": 8192,
        "max_num_workers": 2048,
        "worker_timeout": 3600,
        "total_steps": 2500,
        "steps_per_eval": 25,
        "max_batches_offpolicy": 3,
        "inference_weight": 1.0,
        "eval_limit_ratio": 0.1,
    },
    "openai": {
        "model_name": "Qwen/Qwen3-8B",
        "base_url": "http://localhost:8001/v1",
        "api_key": "x",
        "weight": 1.0,
        "num_requests_for_eval": 256,
        "timeout": 3600,
    },
    "tinker": {
        "lora_rank": 32,
        "learning_rate": 4e-5,
        "max_token_trainer_length": 9000,
        "checkpoint_dir": "./temp/",
        "save_checkpoint_interval": 25,
    },
}
