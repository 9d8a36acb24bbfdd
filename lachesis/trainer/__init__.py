"""Take training steps through the Tinker SDK on batches from the rollout API."""
