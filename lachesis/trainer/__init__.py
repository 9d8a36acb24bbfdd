"""Train a policy by the Tinker API on rollouts from the Atropos API."""
