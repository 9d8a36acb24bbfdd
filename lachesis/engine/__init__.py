"""Train adapters on a base model of this machine, and sample them."""
