"""Start, watch, restart and end the processes of a run."""
