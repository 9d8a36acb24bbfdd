"""Store what a run keeps on disk: its record, metrics, checkpoints and weights."""
