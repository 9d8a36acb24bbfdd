"""Define the keys of each answer to an agent, and next steps as tool calls.

The keys are the contract with agents; docs/reference/tools.md lists them. What is not known is left
out of an answer, and null says that there is no value.
"""

from lachesis.base.json_text import Json

# The keys of each answer; `?` marks those that may be left out.
ANSWER_KEYS: dict[str, str] = {
    "rl_list_environments": "environments count tips problems? clashes?",
    "rl_list_models": "profile default_model models count tips",
    "rl_select_environment": "message environment file_path profile config warning? session",
    "rl_get_current_config": "environment profile model configurable_fields locked_fields tip "
    "problem? warning?",
    "rl_edit_config": "message field value config problem?",
    "rl_start_training": "message server_started? run_id? status? environment config wandb_project "
    "wandb_run_name? config_path? logs? ui_url? queue? duplicate? dry_run? confirmation_required? "
    "preview? profile? base_model? problem? forecast? config_yaml? services? next_steps",
    "rl_check_status": "run_id status phase environment profile running_time_minutes processes "
    "progress queue? wandb_project wandb_run_name wandb_url? wandb_error? checkpoints "
    "checkpoints_expire_at? resumed? forked_from? logs metrics held_out_curve evaluation? pause? "
    "rollouts? dead_environments? health end_cause? error? last_error? ui_url next_steps warning? "
    "rate_limited? message? next_check_in_seconds? reported_seconds_ago?",
    "rl_stop_training": "message run_id status confirmation_required? preview?",
    "rl_get_results": "run_id status environment base_model wandb_project wandb_run_name "
    "wandb_url? wandb_dir? reward loss? accuracy? accuracy_source? held_out held_out_intervals "
    "held_out_curve evaluation? weights final_metrics history metrics_file forecast? actual? "
    "health? rollouts? end_cause? error? next_steps",
    "rl_get_rollouts": "run_id message rollouts next_cursor?",
    "rl_list_runs": "runs count warning? next_cursor?",
    "rl_test_inference": "test_id status message? server_started? environment environment_file "
    "test_config? models_tested? summary? error? stages groups_done groups_total next_steps",
    "rl_check_environment": "check_id status ok? message environment environment_file checks logs "
    "next_steps",
    "rl_health_check": "status version problems prefect_url profile missing_keys "
    "environments_discovered current_environment active_runs max_runs session home note?",
}
# Next steps as tool calls.
NEXT_STEP_CALLS = {
    "status": 'rl_check_status(run_id="{run}")',
    "logs": "read the file `logs.{service}`",
    "stop": 'rl_stop_training(run_id="{run}")',
    "resume": 'rl_start_training(resume="{run}")',
    "raise_budget": 'rl_start_training(resume="{run}", limits={{"{limit}": {value}}})',
    "check": 'rl_check_environment(environment="{environment}")',
    "results": 'rl_get_results(run_id="{run}")',
    "report": "the file that `lachesis report {run}` writes is for people",
    "weights": "hand over `weights.adapter`, a folder, or `weights.best.adapter` where there is a "
    "better checkpoint; `lachesis export {run} --checkpoint best --to DIR` copies the best one "
    "with checksums",
}


def drop_empty(**values: object) -> Json:
    """Return the values that are not empty."""
    return {key: value for key, value in values.items() if value}
