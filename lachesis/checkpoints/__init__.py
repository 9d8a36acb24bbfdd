"""Keep a run's checkpoints, choose among them, and hand their weights over."""
