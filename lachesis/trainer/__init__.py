"""Train a policy through the Tinker API on rollouts from the Atropos API."""
